// Configures one Plot per figure. The rows come from the element `data`; every number is in a table as well.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const policyColors = ["var(--c0)", "var(--c1)", "var(--c2)", "var(--c3)", "var(--c4)"];
  const color = { domain: data.policies, range: policyColors, legend: true };
  const thousands = (value) => (value >= 1e6 ? `${value / 1e6}M` : value >= 1e3 ? `${value / 1e3}k` : `${value}`);

  const below = { marginBottom: 46 }; // room for the axis label under the ticks
  const under = { labelOffset: 40, labelAnchor: "center", labelArrow: "none" };

  const draw = {
    ttft: (rows, width) => distribution(rows, width, "ms after being due (log scale)", "share of requests"),
    wall: (rows, width) => distribution(rows, width, "ms from first turn due to last turn ended (log scale)", "share of sessions"),
    late: (rows, width) => ({ ...distribution(rows, width, "ms late (log scale)", "share of requests"), height: 230 }),

    pairs: (rows, width) => {
      const others = data.policies.filter((policy) => rows.some((row) => row.policy === policy));
      const buckets = Array.from(new Set(rows.map((row) => row.bucket)));
      const ends = rows.flatMap((row) => [row.ratio, row.low ?? row.ratio, row.high ?? row.ratio, 1]);
      const reach = [d3.min(ends) * 0.93, d3.max(ends) * 1.07];
      const steps = reach[1] / reach[0] > 30 ? [1] : reach[1] / reach[0] > 4 ? [1, 2, 5] : [1, 1.2, 1.5, 2, 3, 4, 5, 6, 7, 8, 9];
      const ratios = [0.001, 0.01, 0.1, 1, 10, 100].flatMap((power) => steps.map((step) => Number((power * step).toPrecision(2)))).filter((tick) => tick >= reach[0] && tick <= reach[1]);
      const narrow = width < 560;
      const facet = narrow ? { fy: "policy" } : { fx: "policy" };
      return {
        width, height: (narrow ? others.length : 1) * (34 * buckets.length + 34) + 60, marginLeft: narrow ? 150 : 265, marginTop: 34, ...below,
        marginRight: narrow ? 80 : 20, color: { ...color, legend: false },
        fx: { domain: others, label: null, padding: 0.08 }, fy: { domain: others, label: null, padding: 0.08 },
        x: { ...under, type: "log", domain: reach, grid: true, label: "candidate / baseline (log scale)", ticks: ratios, tickFormat: (ratio) => `${ratio}` },
        y: { domain: buckets, label: null, tickFormat: (name) => (narrow && name.length > 22 ? `${name.slice(0, 21)}…` : name) },
        marks: [
          Plot.ruleX([1], { stroke: "currentColor", strokeOpacity: 0.6, strokeDasharray: "3,3" }),
          Plot.ruleY(rows.filter((row) => row.low !== null), { y: "bucket", x1: "low", x2: "high", stroke: "policy", strokeWidth: 3, strokeOpacity: 0.55, ...facet }),
          Plot.dot(rows, { y: "bucket", x: "ratio", r: (row) => (row.bucket === "all pairs" ? 6 : 4.5), fill: (row) => (row.low === null ? "var(--page)" : colorOf(row.policy)), stroke: (row) => colorOf(row.policy), ...facet, title: describePair }),
        ],
      };
    },

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

    gates: (rows, width) => {
      const steps = ["eligible", "prefix", "route", "residency", "transfer", "hit"];
      const narrow = width < 640;
      const facet = narrow ? { fy: "policy" } : { fx: "policy" };
      const share = (row, side) => (row.of ? (100 * row[side]) / row.of : 0);
      const size = (row) => share(row, "to") - share(row, "from");
      return {
        width, height: narrow ? 240 * data.policies.length + 60 : 320, marginLeft: 48, marginTop: 44, marginRight: narrow ? 92 : 20, ...below,
        fx: { domain: data.policies, label: null, padding: 0.08, axis: "top" }, fy: { domain: data.policies, label: null, padding: 0.12 },
        x: { domain: steps, axis: null }, y: { label: "% of eligible tokens", domain: [0, 100], grid: true, ticks: 5 },
        color: { domain: steps, range: steps.map((step) => `var(--${step})`) },
        marks: [
          Plot.axisX({ label: null, fontSize: narrow ? 12 : 10, tickSize: 0, tickFormat: (step) => (narrow ? step : { residency: "resid.", transfer: "transf." }[step] ?? step) }),
          Plot.barY(rows, { x: "step", y1: (row) => share(row, "from"), y2: (row) => share(row, "to"), fill: "step", ...facet, insetLeft: 2, insetRight: 2, title: (row) => `${row.step}: ${(row.to - row.from).toLocaleString("en")} tokens` }),
          Plot.text(rows, { x: "step", y: (row) => share(row, "to"), text: (row) => (size(row) < 0.05 ? "0" : size(row) < 1 ? size(row).toFixed(1) : `${Math.round(size(row))}`), dy: -7, fill: "currentColor", ...facet }),
          Plot.ruleY([0]),
        ],
      };
    },

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

  function colorOf(policy) {
    return policyColors[data.policies.indexOf(policy) % policyColors.length];
  }

  function describePair(row) {
    const span = row.low === null ? "too few for an interval" : `95 % interval ${row.low.toFixed(3)} to ${row.high.toFixed(3)}`;
    return `${row.policy}, ${row.bucket}: ${row.ratio.toFixed(3)}, ${span}`;
  }

  function distribution(rows, width, label, share) {
    return {
      width, height: 310, marginLeft: 48, marginTop: 28, ...below, color, grid: true,
      x: { ...under, type: "log", label, ticks: logTicks(rows), tickFormat: (ms) => `${ms}` },
      y: { label: share, domain: [0, 1], tickFormat: (part) => `${Math.round(part * 100)} %` },
      marks: [
        Plot.ruleY([0.95], { stroke: "currentColor", strokeOpacity: 0.45, strokeDasharray: "3,3" }),
        Plot.text([[d3.min(rows, (row) => row.value), 0.95]], { text: ["p95"], dy: 8, dx: 2, textAnchor: "start", fillOpacity: 0.7 }),
        Plot.line(ecdf(rows), { x: "value", y: "share", stroke: "policy", strokeWidth: 2, curve: "step-after" }),
      ],
    };
  }

  function logTicks(rows) {
    const [least, most] = d3.extent(rows, (row) => row.value);
    const ticks = d3.range(-2, 7).flatMap((power) => [10 ** power, 3 * 10 ** power]).map((tick) => Number(tick.toPrecision(1)));
    return ticks.filter((tick) => tick >= least && tick <= most);
  }

  function ecdf(rows) {
    return Array.from(d3.group(rows, (row) => row.policy)).flatMap(([policy, own]) => {
      const values = own.map((row) => row.value).sort(d3.ascending);
      return values.map((value, number) => ({ policy, value, share: (number + 1) / values.length }));
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
