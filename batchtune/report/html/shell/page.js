"use strict";
(() => {
  const page = JSON.parse(document.getElementById("document").textContent);
  const config = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "sendChartToCloud"] };

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

  // A role such as "@chosen" becomes the colour that it has in this theme.
  const coloured = (value) => {
    if (typeof value === "string") return value[0] === "@" ? colour(value.slice(1)) || value : value;
    if (Array.isArray(value)) return value.map(coloured);
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, coloured(each)]));
    }
    return value;
  };

  // Where a logarithmic axis is marked: 1, 2, 5, 10, …, more of them where it spans little.
  const ticks = (span, narrow) => {
    const steps = narrow ? (span < 12 ? [1, 2, 5] : [1]) : span < 8 ? [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8] : span < 300 ? [1, 2, 5] : [1];
    const tickvals = [-3, -2, -1, 0, 1, 2, 3, 4, 5, 6].flatMap((power) => steps.map((step) => step * 10 ** power));
    return { tickvals, ticktext: tickvals.map((value) => parseFloat(value.toPrecision(2)).toLocaleString("en-US")) };
  };

  // Paper is light, has a width of its own, and shows what a click would: all that is folded, and the trials.
  const paperWidth = 672, paperHeight = 0.72, mostOnPaper = 100;
  let onPaper = false;

  const themed = (layout, narrow) => {
    const ink = colour("ink"), muted = colour("muted"), grid = colour("grid"), surface = colour("surface");
    const drawn = {
      paper_bgcolor: surface, plot_bgcolor: surface,
      font: { family: "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", size: 12.5, color: ink },
      margin: { l: 60, r: 16, t: 30, b: 48 },
      hoverlabel: { bgcolor: surface, bordercolor: muted, font: { color: ink } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: muted, activecolor: ink },
      ...coloured(layout),
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal", font: { size: 12 }, ...layout.legend },
    };
    for (const key of Object.keys(drawn).concat(["xaxis", "yaxis"])) {
      if (/^[xy]axis\d*$/.test(key)) {
        const { span, ...given } = drawn[key] || {};
        drawn[key] = { gridcolor: grid, zerolinecolor: grid, linecolor: muted, tickcolor: muted, ...given };
        const few = narrow || (onPaper && drawn.grid);
        if (drawn[key].type === "log" && !drawn[key].tickvals) Object.assign(drawn[key], ticks(span, few));
        if (narrow && key === "yaxis" && (layout.yaxis || {}).ticktext) {
          // names above their bars: beside them they would take most of the width
          drawn.annotations = drawn[key].ticktext.map((text, at) => ({
            text, x: 0, xref: "x domain", xanchor: "left", y: drawn[key].tickvals[at], yshift: 13, showarrow: false,
          }));
          Object.assign(drawn[key], { showticklabels: false, ticks: "" });
          drawn.margin = { ...drawn.margin, l: 14 };
        }
        if (narrow && drawn.grid && drawn.grid.columns > 1) {  // one below the other, each panel as wide as the page
          delete drawn[key].domain;
          drawn[key].showticklabels = true;
        }
      }
    }
    if (narrow && drawn.grid && drawn.grid.columns > 1) {
      drawn.grid = { ...drawn.grid, rows: drawn.grid.columns, columns: 1, ygap: 0.35 };
    }
    return drawn;
  };

  const draw = (place) => {
    const figure = page.figures[place.dataset.figure];
    const narrow = !onPaper && place.clientWidth < 560;
    if (narrow && figure.layout.grid && !place.dataset.tall) {
      place.dataset.tall = "yes";
      place.style.height = parseInt(place.style.height) * Math.min(figure.layout.grid.columns, 3) * 0.75 + "px";
    }
    if (narrow && (figure.layout.yaxis || {}).ticktext && !place.dataset.tall) {
      place.dataset.tall = "yes";
      place.style.height = 130 + 38 * figure.layout.yaxis.ticktext.length + "px";
    }
    const layout = themed(figure.layout, narrow);
    const data = coloured(figure.data).map((trace) => !narrow || !trace.colorbar ? trace : {
      ...trace,  // below the map: beside it, it would take a third of the width
      colorbar: {
        ...trace.colorbar, orientation: "h", y: -0.3, yanchor: "top", thickness: 12, nticks: 4,
        title: { ...trace.colorbar.title, side: "top" },
      },
    });
    if (onPaper) Object.assign(layout, { width: paperWidth, height: parseInt(place.style.height) });
    return Plotly.react(place, data, layout, narrow ? { ...config, displayModeBar: false } : config);
  };

  const lay = (places, paper) => {
    if (paper === onPaper) return;
    onPaper = paper;
    document.documentElement.classList.toggle("paper", paper);
    document.documentElement.classList.toggle("many", paper && page.rows.length > mostOnPaper);
    for (const fold of document.querySelectorAll("details")) {
      if (!paper) fold.open = fold.dataset.was === "open";
      else {
        fold.dataset.was = fold.open ? "open" : "closed";
        fold.open = true;
      }
    }
    if (paper && page.rows.length <= mostOnPaper) fillTrials();
    for (const place of places) {
      const height = place.dataset.height = place.dataset.height || place.style.height;
      place.style.height = paper ? Math.round(parseInt(height) * paperHeight) + "px" : height;
      draw(place);
    }
  };

  const element = (name, text, className) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  };

  const numeric = (text) => {
    const value = parseFloat(text.replace(/[,~]/g, ""));
    return Number.isNaN(value) ? null : value;
  };

  const compare = (column, ascending) => (one, other) => {
    const a = numeric(one[column]), b = numeric(other[column]);
    if (a === null || b === null) {
      if (a !== b) return a === null ? 1 : -1;
      return (ascending ? 1 : -1) * one[column].localeCompare(other[column]);
    }
    return (ascending ? 1 : -1) * (a - b);
  };

  const table = (rows, sorted) => {
    const made = element("table"), head = element("tr"), body = element("tbody");
    const fill = (shown) => body.replaceChildren(...shown.map((row) => {
      const line = element("tr");
      row.forEach((cell, at) => line.append(element("td", cell, ["caveats", "why"].includes(page.columns[at]) ? "long" : "")));
      return line;
    }));
    let by = null, ascending = true;
    page.columns.forEach((name, at) => {
      const heading = element("th", name, sorted ? "sortable" : "");
      if (sorted) heading.addEventListener("click", () => {
        ascending = by === at ? !ascending : true;
        by = at;
        fill([...rows].sort(compare(at, ascending)));
      });
      head.append(heading);
    });
    fill(rows);
    const top = element("thead");
    top.append(head);
    made.append(top, body);
    return made;
  };

  const show = (place, number) => {
    const detail = page.details[number];
    if (!detail) return;
    const scroll = element("div", undefined, "scroll");
    scroll.append(table(detail.rows.map((at) => page.rows[at]), false));
    const parameters = detail.parameters.map(([name, value]) => name + " " + value).join(" · ");
    place.replaceChildren(element("h3", detail.heading), element("p", parameters, "lead"), scroll);
  };

  const fillTrials = () => {
    const place = document.getElementById("table");
    if (!place.firstChild) place.append(table(page.rows, true));
  };

  const unpacked = async () => {
    const text = atob(document.getElementById("plotly").textContent), packed = new Uint8Array(text.length);
    for (let at = 0; at < text.length; at += 1) packed[at] = text.charCodeAt(at);
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  };

  const drawAll = async () => {
    const places = [...document.querySelectorAll(".plot")];
    for (const place of places) {
      await draw(place);
      const detail = place.parentElement.querySelector(".detail");
      if (detail) place.on("plotly_click", (event) => {
        const point = event.points.find((each) => each.customdata !== undefined);
        if (point) show(detail, point.customdata);
      });
      performance.mark("drawn " + place.dataset.figure);
      await new Promise((resolve) => setTimeout(resolve));
    }
    return places;
  };

  const start = async () => {
    document.getElementById("all-trials").addEventListener("toggle", fillTrials);
    for (const command of document.querySelectorAll(".command")) command.querySelector("button").addEventListener("click", (event) => {
      const code = command.querySelector("code"), copy = event.target, text = code.textContent;
      const range = document.createRange();
      range.selectNodeContents(code);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      if (navigator.clipboard) navigator.clipboard.writeText(text).then(() => { copy.textContent = "Copied"; }, () => {});
    });
    if (typeof DecompressionStream === "undefined") {
      document.querySelectorAll(".plot").forEach((place) => place.replaceWith(
        element("p", "This browser is too old to draw the figure; any browser since 2023 does.", "missing")));
      return;
    }
    performance.mark("begun");
    const script = element("script");
    script.textContent = await unpacked();
    document.head.append(script);
    const places = await drawAll();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => places.forEach(draw));
    addEventListener("beforeprint", () => lay(places, true));
    addEventListener("afterprint", () => lay(places, false));
    document.documentElement.dataset.drawn = String(places.length);
  };
  start();
})();
