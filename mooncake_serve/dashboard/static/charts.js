// Two uPlot charts that follow the theme and the width of their boxes.

const HEIGHT = 210;

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// As everywhere on the page: in the reader's own way of writing times.
export function clock(at, options) {
  return at == null ? "–" : new Date(1000 * at).toLocaleTimeString([], options);
}

const minute = (at) => clock(at, { hour: "numeric", minute: "2-digit" });

function axis(format, room) {
  return {
    stroke: () => colour("--faint"),
    grid: { stroke: () => colour("--line"), width: 1 },
    ticks: { stroke: () => colour("--line"), width: 1 },
    values: (_, ticks) => ticks.map(format),
    ...room,
  };
}

// The legend tells what is under the pointer, else the newest values.
function tell(plot) {
  if (plot.cursor.idx == null) plot.setLegend({ idx: plot.data[0].length - 1 });
}

// A chart in `box` of lines `[{label, colour, format}]`; `draw(data)` shows `[times, ...values]`.
export function chart(box, lines, range) {
  const { format } = lines[0];
  let plot = null;

  function make(data) {
    box.replaceChildren();
    plot = new uPlot(
      {
        width: box.clientWidth,
        height: HEIGHT,
        cursor: { drag: { x: false, y: false } },
        scales: { y: { range } },
        hooks: { setCursor: [tell], setData: [tell], ready: [tell] },
        axes: [axis(minute, { space: 80, size: 34 }), axis(format, { size: 62 })],
        series: [
          { label: "at", value: (_, at) => clock(at) },
          ...lines.map((line) => ({
            label: line.label,
            stroke: () => colour(line.colour),
            width: 2,
            spanGaps: true,
            points: { show: data[0].length < 40 },
            value: (_, value) => (value == null ? "–" : line.format(value)),
          })),
        ],
      },
      data,
      box,
    );
  }

  new ResizeObserver(() => plot?.setSize({ width: box.clientWidth, height: HEIGHT })).observe(box);

  return {
    draw(data, summary) {
      box.setAttribute("aria-label", summary);
      if (data[0].length === 0) {
        plot?.destroy();
        plot = null;
        box.innerHTML = '<p class="empty">No request has ended yet.</p>';
      } else if (plot === null) {
        make(data);
      } else {
        plot.setData(data);
      }
    },
    redraw() {
      plot?.redraw();
    },
  };
}
