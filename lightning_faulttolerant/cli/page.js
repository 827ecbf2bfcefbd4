"use strict";
for (const plot of document.querySelectorAll("svg[data-readouts]")) {
  const points = JSON.parse(plot.dataset.readouts);
  const cursor = plot.querySelector(".cursor");
  const line = cursor.querySelector("line");
  const dots = cursor.querySelectorAll("circle");
  const output = plot.closest("figure").querySelector("output");
  let at = -1;
  const show = (index) => {
    at = Math.min(Math.max(index, 0), points.length - 1);
    const [x, text, ...ys] = points[at];
    const left = x / 10 + "%";
    line.setAttribute("x1", left);
    line.setAttribute("x2", left);
    dots.forEach((dot, number) => {
      const y = ys[number];
      dot.setAttribute("visibility", y == null ? "hidden" : "inherit");
      dot.setAttribute("cx", left);
      if (y != null) dot.setAttribute("cy", y);
    });
    cursor.setAttribute("visibility", "visible");
    output.textContent = text;
  };
  const hide = () => {
    cursor.setAttribute("visibility", "hidden");
    output.textContent = "";
    at = -1;
  };
  const nearest = (event) => {
    const box = plot.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * 1000;
    let low = 0, high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < x) low = middle; else high = middle;
    }
    show(x - points[low][0] <= points[high][0] - x ? low : high);
  };
  plot.addEventListener("pointermove", nearest);
  plot.addEventListener("pointerdown", nearest);
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const step = {ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20}[event.key];
    if (step === undefined) return;
    event.preventDefault();
    show(at < 0 ? 0 : at + step);
  });
  plot.setAttribute("tabindex", "0");
}
