"""What a browser makes of the pages: one Chromium, each page opened once, looked at on a desk, a phone and paper."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from batchtune.archive.run import Run
from batchtune.cli.commands.report import write_report
from tests.report.chromium import CHROMIUM, Page, chromium_page
from tests.report.pages import (
    EVIL,
    checked_run,
    compared_run,
    evil_page,
    loaded_run,
    quickstart_run,
    rising_rates,
)

pytestmark = pytest.mark.slow


KINDS: dict[str, tuple[Callable[[Path], Run], int, str, str]] = {
    "sweep": (quickstart_run, 9, "pareto", "confirm"),
    "compare": (compared_run, 5, "blocks", "block 1"),
    "load": (lambda root: loaded_run(root, rising_rates()), 5, "load", "500 requests/s"),
    "check": (lambda root: checked_run(root, names=("baseline", EVIL)), 3, "blocks", "block 1"),
}
"""A run; its plots, the timeline of the sweep left out, for its requests are not kept; one of them whose points lead to
trials; and what is told of the trial of a point."""
ROWS = "JSON.parse(document.getElementById('document').textContent).rows"
CLICKS_MAX = 4
"""A busy browser may forget the point under the mouse between a move and a click; people click again."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    with chromium_page(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def run(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return KINDS[kind][0](tmp_path_factory.mktemp(kind))


@pytest.fixture(scope="module")
def opened(browser: Page, run: Run) -> Page:
    """The page of one kind, drawn; whatever it did wrong is in `problems`, what it asked for in `asked`."""
    browser.problems.clear()
    browser.asked.clear()
    browser.open(write_report(run))
    return browser


def test_every_plot_is_drawn_without_an_error_or_a_request(opened: Page, kind: str) -> None:
    plots = opened.evaluate("[...document.querySelectorAll('.plot')].map((p) => p.dataset.figure)")
    empty = opened.evaluate(
        "[...document.querySelectorAll('.plot')].filter((p) => !p.querySelector('.trace, .hm, .bars .point, .points path'))"
        ".map((p) => p.dataset.figure)"
    )
    assert len(plots) == KINDS[kind][1]
    assert empty == []
    assert (
        opened.evaluate("document.querySelectorAll('[data-title*=hare]').length") == 0
    )  # nothing to a cloud
    assert opened.problems == []
    assert [address for address in opened.asked if not address.startswith(("file:", "data:", "blob:"))] == []


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 800)])
def test_first_screen_shows_the_answers(opened: Page, kind: str, width: int, height: int) -> None:
    opened.resize(width=width, height=height)
    bottoms = opened.evaluate(
        "[...document.querySelectorAll('.answer')].map((answer) => answer.getBoundingClientRect().bottom + scrollY)"
    )
    assert len(bottoms) == (3 if kind == "check" else 4)  # of a check: as good, why, how sure
    assert max(bottoms) <= height
    assert opened.waited(f"document.documentElement.scrollWidth <= {width}")  # the plots follow the window


def place_of_a_point(opened: Page, figure: str) -> tuple[float, float]:
    """In the window, with its plot in the middle, once every plot is as wide as its place."""
    assert opened.waited(
        "[...document.querySelectorAll('.plot')].every((p) =>"
        " Math.abs(p.querySelector('.main-svg').getBoundingClientRect().width - p.clientWidth) < 2)"
    )
    x, y = opened.evaluate(
        f"(() => {{ const plot = document.querySelector('[data-figure={figure}]');"
        " plot.scrollIntoView({block: 'center'});"
        " const traces = [...plot.querySelectorAll('.scatterlayer .trace')].filter((t) => t.querySelector('.point'));"
        " const trace = plot.dataset.figure === 'pareto' ? traces[traces.length - 1] : traces[0];"
        " const box = trace.querySelector('.point').getBoundingClientRect();"
        " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
    )
    return x, y


def test_a_point_shows_its_figures_under_the_mouse_and_its_trials_after_a_click(
    opened: Page, kind: str
) -> None:
    _, _, figure, words = KINDS[kind]
    detail = ""
    for _ in range(CLICKS_MAX):
        place = place_of_a_point(opened, figure)  # the plots above may have followed the window meanwhile
        opened.move(0, 0)
        opened.move(*place)
        assert opened.waited("document.querySelector('.hovertext')?.textContent")
        opened.click(*place)
        detail = opened.waited(f"document.querySelector('#{figure} .detail').textContent")
        if detail:
            break
    assert "p95 ms" in detail
    assert words in detail


def test_on_paper_every_plot_is_light_and_within_the_page_and_nothing_stays_folded(opened: Page) -> None:
    """Chromium's own print to PDF, of a page in the dark theme, from one who opened none of the folds."""
    opened.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    opened.evaluate(
        "addEventListener('beforeprint', () => { window.paper = {"
        " widths: [...document.querySelectorAll('.plot .main-svg')].map((svg) => parseFloat(svg.getAttribute('width'))),"
        " papers: [...new Set([...document.querySelectorAll('.plot')].map((p) => p.layout.paper_bgcolor))],"
        " folded: document.querySelectorAll('details:not([open])').length,"
        " rows: document.querySelectorAll('#table tbody tr').length,"
        " ink: getComputedStyle(document.body).color }; })"
    )
    opened.call("Page.printToPDF")
    paper = opened.evaluate("window.paper")
    assert paper["papers"] == ["#ffffff"]
    assert max(paper["widths"]) <= 690  # of 703 px between the margins of A4, less the frame of a figure
    assert paper["folded"] == 0
    assert paper["rows"] == opened.evaluate(f"{ROWS}.length")
    assert paper["ink"] == "rgb(22, 25, 29)"
    after = "[document.querySelector('.plot').layout.paper_bgcolor, document.querySelectorAll('details[open]').length]"
    assert opened.evaluate(after) == ["#181b20", 0]
    opened.call("Emulation.setEmulatedMedia", features=[])


def test_all_trials_are_sorted_by_a_click_on_a_heading(opened: Page) -> None:
    opened.evaluate("document.getElementById('all-trials').open = true")
    opened.waited("document.querySelector('#table th')?.textContent")
    opened.evaluate(
        "[...document.querySelectorAll('#table th')].find((h) => h.textContent === 'p95 ms').click()"
    )
    cells = opened.evaluate(
        "[...document.querySelectorAll('#table tbody tr')].map((row) => parseFloat(row.children[6].textContent.replace(',', '')))"
    )
    assert len(cells) == opened.evaluate(f"{ROWS}.length")
    numbers = [cell for cell in cells if cell is not None]
    assert numbers == sorted(numbers)


def test_a_scenario_named_as_a_script_is_harmless(browser: Page, tmp_path: Path) -> None:
    file = tmp_path / "evil.html"
    file.write_text(evil_page(tmp_path))
    browser.problems.clear()
    browser.open(file)
    assert browser.evaluate("window.hacked === undefined")
    assert EVIL in browser.evaluate("document.querySelector('h1').textContent")
    assert browser.problems == []


def test_a_phone_shows_logarithmic_axes_and_whole_words_of_commands(browser: Page, run: Run) -> None:
    browser.open(write_report(run), width=390, height=844)
    decades = browser.evaluate(
        "[...document.querySelectorAll('.plot')].map((plot) => plot._fullLayout.yaxis)"
        ".filter((axis) => axis && axis.type === 'log').map((axis) => Math.abs(axis.range[1] - axis.range[0]))"
    )
    assert all(span < 6 for span in decades), decades
    broken = browser.evaluate(
        "[...document.querySelectorAll('.command code')].flatMap((code) => {"
        " const range = document.createRange(), node = (at) => document.createTreeWalker(code, 4);"
        " return [...code.querySelectorAll('span.word')].filter((word) => word.textContent.length < 30"
        " && word.getClientRects().length > 1).map((word) => word.textContent); })"
    )
    assert broken == []
