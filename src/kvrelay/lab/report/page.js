// Configures one Plot per figure. The rows come from the element `data`; every number is in a table as well.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const policyColors = ["var(--c0)", "var(--c1)", "var(--c2)", "var(--c3)", "var(--c4)"];
  const color = { domain: data.policies, range: policyColors, legend: true };
  const gates = ["hit", "prefix", "route", "residency", "transfer"];
  const thousands = (value) => (value >= 1e6 ? `${value / 1e6}M` : value >= 1e3 ? `${value / 1e3}k` : `${value}`);

  const below = { marginBottom: 46 }; // room for the axis label under the ticks
  const under = { labelOffset: 40, labelAnchor: "center", labelArrow: "none" };

  const draw = {
    ttft: (rows, width) => ({
      width, height: 310, marginLeft: 48, marginTop: 28, ...below, color, grid: true,
      x: { ...under, type: "log", label: "ms after being due (log scale)", ticks: logTicks(rows), tickFormat: (ms) => `${ms}` },
      y: { label: "share of requests", domain: [0, 1], tickFormat: (share) => `${Math.round(share * 100)} %` },
      marks: [
        Plot.ruleY([0.95], { stroke: "currentColor", strokeOpacity: 0.45, strokeDasharray: "3,3" }),
        Plot.text([[d3.min(rows, (row) => row.ttft_ms), 0.95]], { text: ["p95"], dy: 8, dx: 2, textAnchor: "start", fillOpacity: 0.7 }),
        Plot.line(ecdf(rows), { x: "ttft_ms", y: "share", stroke: "policy", strokeWidth: 2, curve: "step-after" }),
      ],
    }),

    hits: (rows, width) => ({
      width, height: 72 + 64 * data.policies.length, marginLeft: 92, ...below, color: { ...color, legend: false },
      x: { ...under, label: "hit tokens", zero: true, grid: true, tickFormat: thousands, ticks: width < 480 ? 4 : 7 },
      y: { label: null, domain: data.policies },
      marks: [
        Plot.barX(rows, Plot.groupY({ x: "mean" }, { x: "hit_tokens", y: "policy", fill: "policy", fillOpacity: 0.28 })),
        Plot.tickX(rows, Plot.groupY({ x: "mean" }, { x: "hit_tokens", y: "policy", stroke: "policy", strokeWidth: 2 })),
        Plot.dot(rows, { x: "hit_tokens", y: "policy", fill: "policy", r: 4.5, stroke: "var(--page)", title: (row) => `repeat ${row.repeat}: ${row.hit_tokens}` }),
        Plot.ruleX([0]),
      ],
    }),

    gates: (rows, width) => ({
      width, height: 72 + 64 * data.policies.length, marginLeft: 92, ...below,
      color: { domain: gates, range: gates.map((gate) => `var(--${gate})`), legend: true },
      x: { ...under, label: "% of eligible tokens", percent: true, grid: true },
      y: { label: null, domain: data.policies },
      marks: [
        Plot.barX(rows, Plot.stackX({ offset: "normalize", order: gates }, {
          x: "tokens", y: "policy", fill: "gate", insetRight: 1, title: (row) => `${row.gate}: ${row.tokens} tokens`,
        })),
        Plot.ruleX([0]),
      ],
    }),

    claims: (rows, width) => {
      const most = d3.max(rows, (row) => Math.max(row.claimed, row.actual)) || 1;
      const narrow = width < 480;
      const facet = narrow ? { fy: "policy" } : { fx: "policy" };
      return {
        width, height: narrow ? 170 * data.policies.length + 60 : 310, marginLeft: 48, marginTop: 44, marginRight: narrow ? 92 : 20, ...below,
        color: { ...color, legend: false }, grid: true,
        fx: { domain: data.policies, label: null, padding: 0.12 }, fy: { domain: data.policies, label: null, padding: 0.12 },
        x: { ...under, label: "claimed tokens", domain: [0, most], tickFormat: thousands, ticks: narrow ? 5 : 3, nice: true },
        y: { label: "actual hit tokens", domain: [0, most], tickFormat: thousands, ticks: 4, nice: true },
        marks: [
          Plot.line([[0, 0], [most, most]], { stroke: "currentColor", strokeOpacity: 0.5, strokeDasharray: "3,3" }),
          Plot.dot(rows, { x: "claimed", y: "actual", fill: "policy", ...facet, r: 3, fillOpacity: 0.55, clip: true }),
        ],
      };
    },

    load: (rows, width) => ({
      width, height: 110 * data.policies.length + 74, marginLeft: 48, marginRight: 92, marginTop: 28, ...below, grid: true,
      color: { domain: data.workers, range: data.workers.map((_, number) => `var(--w${number % 8})`), legend: true },
      fy: { domain: data.policies, label: null, padding: 0.14 },
      x: { ...under, label: "seconds of the replay", ticks: width < 480 ? 4 : 10 },
      y: { label: "requests in flight", ticks: 4 },
      marks: [
        Plot.lineY(rows, { x: "at_s", y: "in_flight", stroke: "worker", fy: "policy", curve: "step", strokeWidth: 1.7, strokeOpacity: 0.9 }),
        Plot.ruleY([0]),
      ],
    }),
  };

  function logTicks(rows) {
    const [least, most] = d3.extent(rows, (row) => row.ttft_ms);
    return [1, 3, 10, 30, 100, 300, 1000, 3000, 10000, 30000].filter((tick) => tick >= least && tick <= most);
  }

  function ecdf(rows) {
    return Array.from(d3.group(rows, (row) => row.policy)).flatMap(([policy, own]) => {
      const times = own.map((row) => row.ttft_ms).sort(d3.ascending);
      return times.map((ttft_ms, number) => ({ policy, ttft_ms, share: (number + 1) / times.length }));
    });
  }

  function render(figure, width) {
    const kind = figure.dataset.kind;
    const { title, rows } = data.charts[kind];
    const place = figure.querySelector(".plot");
    if (!rows.length) {
      place.textContent = "No data.";
      return;
    }
    const plot = Plot.plot({ ...draw[kind](rows, width), style: { fontSize: "12px" } });
    place.replaceChildren(plot);
    const chart = plot.tagName === "svg" ? plot : plot.querySelector(":scope > svg:last-of-type");
    chart.setAttribute("role", "img");
    chart.setAttribute("aria-label", `${title}. ${figure.querySelector("figcaption").textContent} The numbers are in the table below.`);
  }

  const widths = new WeakMap();
  const observer = new ResizeObserver((entries) => {
    for (const { target, contentRect } of entries) {
      const width = Math.floor(contentRect.width);
      if (width > 0 && widths.get(target) !== width) {
        widths.set(target, width);
        render(target.closest("figure.chart"), width);
      }
    }
  });
  document.querySelectorAll(".chart .plot").forEach((place) => observer.observe(place));
})();
