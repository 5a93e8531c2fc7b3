"use strict";
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const figure = read("figure");
  const data = read("data");
  const chart = document.getElementById("chart");
  const path = document.getElementById("path");
  const tip = document.getElementById("tip");
  const HALF = 0.36; // of a row's height, to either side of its middle

  const traceOf = {};
  figure.data.forEach((trace, index) => { traceOf[trace.name] = index; });

  // The bars of one row in view, as one closed path for each colour. Bars less than half a pixel apart
  // are drawn as one, so that what is drawn is bounded by the pixels and not by the kernels.
  function paths(place, from, to, gap) {
    const row = data.rows[place];
    const groups = row.colours.map(() => ({ x: [], y: [], end: null }));
    const put = (group, begin, end) => {
      group.x.push(begin, end, end, begin, begin, null);
      group.y.push(place - HALF, place - HALF, place + HALF, place + HALF, place - HALF, null);
    };
    for (const [begin, end, index] of row.bars) {
      if (end < from || begin > to) continue;
      const group = groups[index];
      if (group.end !== null && begin <= group.end + gap) {
        group.end = Math.max(group.end, end);
      } else {
        if (group.end !== null) put(group, group.begin, group.end);
        group.begin = begin;
        group.end = end;
      }
    }
    for (const group of groups) if (group.end !== null) put(group, group.begin, group.end);
    return groups;
  }

  const axes = () => ({ x: chart._fullLayout.xaxis2, y: chart._fullLayout.yaxis2 });

  function draw() {
    const { x } = axes();
    const [from, to] = x.range;
    const gap = ((to - from) / Math.max(x._length, 1)) * 0.5;
    const change = { x: [], y: [] };
    const which = [];
    data.rows.forEach((row, place) => {
      paths(place, from, to, gap).forEach((group, index) => {
        change.x.push(group.x);
        change.y.push(group.y);
        which.push(traceOf[`${place}.${index}`]);
      });
    });
    hide();
    return Plotly.restyle(chart, change, which);
  }

  // The bar at a point of the page; short ones may be missed by a few pixels.
  function barAt(event) {
    const box = chart.getBoundingClientRect();
    const { x, y } = axes();
    const left = event.clientX - box.left - x._offset;
    const top = event.clientY - box.top - y._offset;
    if (left < -2 || left > x._length + 2 || top < 0 || top > y._length) return null;
    const place = Math.round(y.p2l(top));
    const row = data.rows[place];
    if (!row || Math.abs(y.p2l(top) - place) > HALF + 0.06) return null;
    const at = x.p2l(left);
    const reach = (x.p2l(4) - x.p2l(0));
    let best = null;
    let nearest = reach;
    for (const bar of row.bars) {
      if (bar[0] > at + reach) break;
      const away = bar[0] > at ? bar[0] - at : bar[1] < at ? at - bar[1] : 0;
      if (away === 0 ? nearest > 0 || !best || bar[1] - bar[0] < best[1] - best[0] : away < nearest) {
        best = bar;
        nearest = away;
      }
    }
    return best && { bar: best, place, row };
  }

  function words(found) {
    const [begin, end, , what, index] = found.bar;
    const when = `${data.source ? found.row.source + ", " : ""}${time(begin)} to ${time(end)}`;
    const lines = what === "k" ? data.kernels[index]
      : what === "s" ? data.stalls[index]
      : what === "m" ? data.measuredStalls[index]
      : what === "t" ? data.tensors[index] || [`tensor ${index}`]
      : [`${{ r: "recompute: kernel", c: "compress: tensor", e: "expand: tensor" }[what]} ${index}`,
         ...(what === "r" ? data.kernels[index] || [] : data.tensors[index] || [])];
    return [lines[0], `${when} (${time(end - begin)})`, ...lines.slice(1)];
  }

  function time(seconds) {
    const size = Math.abs(seconds);
    if (size >= 1) return `${seconds.toFixed(3)} s`;
    if (size >= 1e-3) return `${(seconds * 1e3).toPrecision(4)} ms`;
    return `${(seconds * 1e6).toPrecision(3)} us`;
  }

  function hide() {
    tip.style.display = "none";
    path.replaceChildren();
  }

  function shape(name, attributes) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    path.append(element);
  }

  // Every copy of one tensor, and dashes from where it left to where it came back.
  function outline(found) {
    path.replaceChildren();
    const { x, y } = axes();
    const clamp = (value) => Math.min(Math.max(value, 0), x._length);
    const height = Math.abs(y.l2p(HALF) - y.l2p(-HALF));
    const of = [];
    const pick = found.bar[3] === "t"
      ? (bar, row) => bar[3] === "t" && bar[4] === found.bar[4] && row.source === found.row.source
      : (bar) => bar === found.bar;
    data.rows.forEach((row, place) => row.bars.forEach((bar) => {
      if (!pick(bar, row)) return;
      const begin = x._offset + clamp(x.l2p(bar[0]));
      const end = x._offset + clamp(x.l2p(bar[1]));
      const middle = y._offset + y.l2p(place);
      shape("rect", { x: begin - 1, y: middle - height / 2 - 1, width: Math.max(end - begin, 1) + 2,
        height: height + 2, fill: "none", stroke: "#1f2933", "stroke-width": 2, rx: 2 });
      of.push({ begin, end, middle, out: row.stream === "device_to_host" || row.stream === "disk_write", at: bar[0] });
    }));
    if (found.bar[3] !== "t") return;
    of.sort((a, b) => a.at - b.at);
    of.forEach((here, index) => {
      const next = of[index + 1];
      if (here.out && next && !next.out) {
        shape("path", { d: `M${here.end},${here.middle} C${here.end + 24},${here.middle} ${next.begin - 24},${next.middle} ${next.begin},${next.middle}`,
          fill: "none", stroke: "#1f2933", "stroke-width": 1.6, "stroke-dasharray": "5 4" });
      }
    });
  }

  function show(event, found) {
    tip.replaceChildren();
    words(found).forEach((line, index) => {
      const element = document.createElement(index ? "div" : "b");
      if (index > 1) element.className = "faint";
      element.textContent = line;
      tip.append(element);
    });
    tip.style.display = "block";
    // Above the streams, so that the path of a tensor stays in sight.
    const box = chart.getBoundingClientRect();
    const left = event.clientX - box.left;
    const right = left + 18 + tip.offsetWidth > box.width;
    tip.style.left = `${Math.max(0, right ? left - 18 - tip.offsetWidth : left + 18)}px`;
    const above = axes().y._offset - 10 - tip.offsetHeight;
    tip.style.top = `${box.top + above < 0 ? event.clientY - box.top + 22 : above}px`;
  }

  let shown = null;
  function point(event) {
    if (event.buttons) return hide();
    const found = barAt(event);
    if (!found) {
      shown = null;
      return hide();
    }
    if (found.bar !== shown) outline(found);
    shown = found.bar;
    show(event, found);
  }

  Plotly.newPlot(chart, figure.data, figure.layout, {
    responsive: true,
    displaylogo: false,
    modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"],
  }).then(draw).then(() => {
    chart.on("plotly_relayout", (change) => {
      if (Object.keys(change).some((key) => key.startsWith("xaxis") || key === "autosize")) draw();
    });
    chart.addEventListener("mousemove", point);
    chart.addEventListener("mouseleave", () => { shown = null; hide(); });
    document.documentElement.dataset.ready = "yes";
  });
})();
