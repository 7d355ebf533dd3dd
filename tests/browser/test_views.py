"""Every view of the page, driven in a browser, on a recorded real run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe

from tests.browser.conftest import Viewed, Watched, number_of, rewards_of, take_picture
from torchtitan_rl.observability.sinks import read_rows

VIEWS = ("overview", "curves", "rollouts", "timeline", "now", "config")
GRAVE = {"serious", "critical"}

Visit = Callable[..., Watched]


@pytest.fixture(scope="module")
def served(view: Callable[..., Viewed], recorded: Path) -> Viewed:
    return view(recorded)


def rows_of(run: Path, name: str) -> list[dict[str, Any]]:
    return [line.row for line in read_rows(run / name)]


def test_overview_answers_with_the_numbers_of_the_files(
    served: Viewed, visit: Visit, recorded: Path
) -> None:
    seen = visit(served.url)
    seen.go("#/overview")
    text = seen.page.inner_text("main")
    evaluations = [row for row in rows_of(recorded, "metrics.jsonl") if row["kind"] == "evaluation"]
    for row in (evaluations[0], evaluations[-1]):
        assert f"{row['evaluation/reward_mean']:.3f}" in text
    for question in ("Does it learn?", "What limits its speed?", "Is anything wrong?"):
        assert question in text
    take_picture(seen.page, "overview")


def test_curves_show_a_chosen_metric_with_its_values(
    served: Viewed, visit: Visit, recorded: Path
) -> None:
    seen = visit(served.url)
    seen.go("#/curves?names=trainer/entropy&x=tokens&smooth=0.5")
    assert seen.page.input_value("select >> nth=0") == "tokens"
    card = seen.page.locator("article, section").filter(has_text="trainer/entropy").last
    card.locator("summary").click()
    steps = [row for row in rows_of(recorded, "metrics.jsonl") if row["kind"] == "step"]
    table = card.locator("table").inner_text()
    assert f"{steps[-1]['trainer/entropy']:.4g}"[:5] in table
    take_picture(seen.page, "curves")


def test_rollouts_are_filtered_by_the_address_and_by_hand(
    served: Viewed, visit: Visit, recorded: Path
) -> None:
    trained = [row for row in rows_of(recorded, "rollouts.jsonl") if row["split"] == "train"]
    of_step = [row for row in trained if row["step"] == 2]
    seen = visit(served.url)
    seen.go("#/rollouts?split=train&step=2&sort=reward")
    assert f"{len(of_step)} rollouts" in seen.page.inner_text("main")
    rewards = rewards_of(seen)
    best = sorted(round(row["reward"], 3) for row in of_step)
    assert rewards == best[: len(rewards)]
    seen.page.fill("input[name=problem]", of_step[0]["problem_id"])
    same = [row for row in of_step if row["problem_id"] == of_step[0]["problem_id"]]
    seen.page.wait_for_function(
        "count => document.querySelectorAll('table.rollouts tbody tr').length === count",
        arg=len(same),
    )
    assert rewards_of(seen) == sorted(round(row["reward"], 3) for row in same)
    assert "problem=" in seen.page.url
    take_picture(seen.page, "rollouts")


def test_text_search_finds_what_a_policy_wrote(
    served: Viewed, visit: Visit, recorded: Path
) -> None:
    row = next(row for row in rows_of(recorded, "rollouts.jsonl") if row["split"] == "train")
    word = row["turns"][0]["text"].split()[0]
    seen = visit(served.url)
    seen.go("#/rollouts")
    seen.page.get_by_label("Search", exact=True).fill(word)
    seen.page.wait_for_function("() => location.hash.includes('q=')")
    seen.page.locator("table.rollouts tbody a").first.click()
    seen.shows(word)


def test_a_rollout_shows_its_tokens_with_their_values(
    served: Viewed, visit: Visit, recorded: Path
) -> None:
    rows = rows_of(recorded, "rollouts.jsonl")
    row = next(row for row in rows if row["split"] == "train" and row["turns"])
    seen = visit(served.url)
    seen.go(f"#/rollouts/{number_of(served, row)}?show=tokens&turn=0&token=0")
    turn = row["turns"][0]
    panel = seen.page.locator(".token-panel")
    seen.page.locator(".tokens .token").first.click()
    text = panel.inner_text()
    assert f"{-turn['logprobs'][0]:.3f}" in text
    assert str(turn["token_ids"][0]) in text
    take_picture(seen.page, "tokens")


def test_a_rollout_links_its_siblings(served: Viewed, visit: Visit, recorded: Path) -> None:
    rows = rows_of(recorded, "rollouts.jsonl")
    one = next(row for row in rows if row["split"] == "train")
    siblings = [row for row in rows if row["group_id"] == one["group_id"]]
    seen = visit(served.url)
    seen.go(f"#/rollouts/{number_of(served, one)}")
    seen.page.get_by_role("link", name="Group").or_(
        seen.page.get_by_role("tab", name="Group")
    ).first.click()
    for row in siblings:
        seen.shows(f"{row['reward']:.3f}")


def test_the_timeline_lists_all_processes_and_is_downloaded(served: Viewed, visit: Visit) -> None:
    seen = visit(served.url)
    seen.go("#/timeline")
    text = seen.page.inner_text("main")
    assert "replica0" in text
    assert "trainer" in text
    with seen.page.expect_download() as download:
        seen.page.get_by_role("link", name="Download for Perfetto").click()
    trace = json.loads(Path(download.value.path()).read_text())
    assert len(trace["traceEvents"]) > 20
    take_picture(seen.page, "timeline")


def test_configuration_has_every_field_and_the_command_to_resume(
    served: Viewed, visit: Visit, recorded: Path
) -> None:
    seen = visit(served.url)
    seen.go("#/config")
    fields = json.loads((recorded / "identity.json").read_text())
    assert str(fields["trainer.optimizer.learning_rate"]) in seen.page.inner_text("main")
    seen.page.get_by_label("Filter").fill("group_size")
    seen.page.wait_for_timeout(300)
    text = seen.page.inner_text("main")
    assert "rollout.group_size" in text
    assert "trainer.optimizer.learning_rate" not in text
    take_picture(seen.page, "config")


def test_two_runs_are_laid_over_each_other(
    view: Callable[..., Viewed], visit: Visit, recorded: Path, tmp_path: Path
) -> None:
    import shutil

    other = tmp_path / "other"
    shutil.copytree(recorded, other)
    served = view(recorded, other)
    seen = visit(served.url)
    seen.go("#/curves?names=train/reward_mean&runs=0,1")
    text = seen.page.inner_text("main")
    assert "other" in text
    assert recorded.name in text


@pytest.mark.parametrize("route", [*VIEWS, "rollouts/30", "rollouts/30?show=tokens"])
def test_axe_finds_no_serious_fault_in_light_and_dark(
    served: Viewed, visit: Visit, route: str
) -> None:
    """The schemes differ in colours only."""
    seen = visit(served.url, color_scheme="light")
    seen.go(f"#/{route}")
    found = Axe().run(seen.page).response["violations"]
    seen.page.emulate_media(color_scheme="dark")
    seen.settled()
    contrast = {"runOnly": ["color-contrast"]}
    found += Axe().run(seen.page, options=contrast).response["violations"]
    assert [(one["id"], one["help"]) for one in found if one["impact"] in GRAVE] == []


def test_the_keyboard_alone_reaches_everything(served: Viewed, visit: Visit) -> None:
    seen = visit(served.url)
    seen.go("#/overview")
    page = seen.page

    def press_until(key: str, condition: str, most: int = 80) -> None:
        for _ in range(most):
            page.keyboard.press(key)
            if page.evaluate(f"() => {{ const at = document.activeElement; return {condition}; }}"):
                return
        raise AssertionError(f"{condition} is not reached by {key}")

    for name in ("Curves", "Rollouts", "Timeline", "Now", "Configuration", "Overview", "Rollouts"):
        page.keyboard.press("Home")
        press_until("Tab", f"at.closest('nav') !== null && at.textContent === '{name}'")
        page.keyboard.press("Enter")
        page.wait_for_function("name => document.title.includes(name)", arg=name)
        seen.settled()
    press_until("Tab", "at.name === 'q'")
    press_until("Tab", "at.dataset.n !== undefined")
    before = page.evaluate("() => document.activeElement.dataset.n")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("() => document.activeElement.dataset.n") != before
    page.keyboard.press("Enter")
    page.wait_for_function("() => /#\\/rollouts\\/\\d+/.test(location.hash)")
    seen.settled()
    press_until("Tab", "at.textContent.startsWith('Tokens')")
    page.keyboard.press("Enter")
    page.wait_for_selector(".token-panel")
    press_until("Tab", "at.classList.contains('tokens')")
    first = page.inner_text(".token-panel")
    page.keyboard.press("ArrowRight")
    assert page.inner_text(".token-panel") != first


@pytest.mark.parametrize("route", VIEWS)
def test_a_narrow_window_does_not_scroll_sideways(served: Viewed, visit: Visit, route: str) -> None:
    seen = visit(served.url, viewport={"width": 390, "height": 844})
    seen.go(f"#/{route}")
    wide, window = seen.page.evaluate("() => [document.body.scrollWidth, innerWidth]")
    assert wide <= window


CONTROLS = """() => {
    document.activeElement.blur();
    window.visited = new Set();
    window.wanted = [...document.querySelectorAll(
        'a[href], button, input, select, summary, [tabindex="0"]'
    )].filter((one) => one.checkVisibility({visibilityProperty: true})
        && !one.disabled && one.tabIndex >= 0);
    return window.wanted.length;
}"""
MISSED = """() => window.wanted
    .filter((one) => one.isConnected && !window.visited.has(one))
    .map((one) => one.outerHTML.slice(0, 100))"""


@pytest.mark.parametrize("route", [*VIEWS, "rollouts/30", "rollouts/30?show=tokens"])
def test_tab_reaches_every_control(served: Viewed, visit: Visit, route: str) -> None:
    seen = visit(served.url)
    seen.go(f"#/{route}")
    for _ in range(seen.page.evaluate(CONTROLS) + 60):  # the browser's own stops, too
        seen.page.keyboard.press("Tab")
        seen.page.evaluate("() => { window.visited.add(document.activeElement); }")
    assert seen.page.evaluate(MISSED) == []
