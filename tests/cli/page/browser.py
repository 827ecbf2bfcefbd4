"""A headless Chromium that opens pages from files, and reports on them."""

import base64
import json
import shutil

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By

# The tests may run as root.
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run")
FLAGS += ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars")
WIDE, PHONE = 1280, 390
_OWN = ("chrome:", "chrome-untrusted:")


def missing():
    """Return the name of what is not installed, or None."""
    names = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(names)} not installed (make browser)" if names else None


class Browser:
    """A separate browser, practically without a network."""

    def __init__(self, directory):
        options = ChromeOptions()
        options.binary_location = shutil.which("chromium")
        for flag in (*FLAGS, f"--user-data-dir={directory}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = Chrome(options=options, service=Service(shutil.which("chromedriver")))
        self.driver.get("about:blank")  # its own start page makes requests, and complains
        self.complaints()

    def close(self):
        """End the browser and its driver."""
        self.driver.quit()

    def open(self, path, *, width=WIDE, scheme="light"):
        """Show a page from a file."""
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == PHONE}
        self.command("Emulation.setDeviceMetricsOverride", **screen)
        self.driver.get(path.as_uri())

    def command(self, name, **values):
        """Send a command of the DevTools protocol."""
        return self.driver.execute_cdp_cmd(name, values)

    def ask(self, script, *values):
        """Return the result of a JavaScript function body."""
        return self.driver.execute_script(script, *values)

    def complaints(self):
        """Return the new messages in the console since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self):
        """Return the addresses requested since the last call, without those of its start page."""
        events = (json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance"))
        sent = [event["params"]["request"] for event in events if event["method"] == "Network.requestWillBeSent"]
        return [request["url"] for request in sent if not request["url"].startswith(_OWN)]

    def find(self, selector):
        """Return the first element that a CSS selector finds."""
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def hover(self, element, *, share):
        """Rest the pointer on an element, at a share of its width from the left."""
        aside = round((share - 0.5) * element.size["width"])
        ActionChains(self.driver, duration=0).scroll_to_element(element).move_to_element_with_offset(
            element, aside, 0
        ).perform()
        self.driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")

    def picture(self, path, *, width, height):
        """Write the page, from its top, as PNG."""
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.command("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))
