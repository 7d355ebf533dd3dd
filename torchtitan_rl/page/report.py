"""One HTML file that shows a run without a server: the page's own files, with answers that were
taken once.

The file needs no network. Its content security policy allows only the script and the style that it
contains, by their digests, so that a run's texts are never executed.

What does not fit is thinned: curves to fewer points, the timeline to fewer spans, and of the
rollouts only a sample has its tokens.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

import msgspec

from torchtitan_rl.page import views
from torchtitan_rl.page.app import show_rollout
from torchtitan_rl.page.index import RunIndex
from torchtitan_rl.page.values import Json

_MAX_POINTS = 400  # of a curve
_MAX_BRIEFS = 2_000  # rollouts in the list
_BRIEF_BYTES = 450  # of a usual rollout in the list
_MAX_SAMPLED_STEPS = 20
_MAX_LAST = 100  # rollouts of the last step
_SHARE = 0.25  # of the size, for the curves and for the timeline
_FILLED = 0.95  # of the size; escaped characters need the rest
_WIDTH = 1_500


async def make_report(run: RunIndex, *, max_bytes: int) -> bytes:
    """The file, of about ``max_bytes`` at most. The index has read all files of the run."""
    static = files("torchtitan_rl.page").joinpath("static")
    names = ("index.html", "app.css", "app.js")
    page = {name: static.joinpath(name).read_text(encoding="utf-8") for name in names}
    described = [views.describe_run(0, run)]
    answers: Json = {
        "at_unix_s": time.time(),
        "/api/runs": described,
        "/api/catalogue": views.catalogue(),
        "/api/runs/0/overview": views.overview(run),
        "/api/runs/0/config": views.configuration(run),
        "/api/runs/0/metrics": _curves(run, round(_SHARE * max_bytes)),
        "/api/runs/0/timeline": _timeline(run, round(_SHARE * max_bytes)),
    }
    left = round(_FILLED * max_bytes) - _size(answers) - sum(map(len, page.values()))
    answers |= await _rollouts(run, left)
    return _inlined(page, answers).encode()


def _curves(run: RunIndex, most: int) -> Json:
    names = views.metrics(run, None)["names"]
    found, points = views.metrics(run, names), _MAX_POINTS
    while True:
        thinned = {
            "names": names,
            "axes": {
                kind: {name: _thin(values, points) for name, values in axis.items()}
                for kind, axis in found["axes"].items()
            },
            "series": {
                name: one | {"value": [_short(value) for value in _thin(one["value"], points)]}
                for name, one in found["series"].items()
            },
        }
        if _size(thinned) <= most or points < 10:
            return thinned
        points //= 2


def _timeline(run: RunIndex, most: int) -> Json:
    width = _WIDTH
    while True:
        found = views.show_timeline(run, {"width": str(width)})
        found["steps"] = _thin(found["steps"], width)
        if _size(found) <= most or width < 20:
            return found
        width //= 2


async def _rollouts(run: RunIndex, left: int) -> Json:
    """The list of rollouts, and the rollouts of a sample as long as there is room."""
    most = max(1, min(_MAX_BRIEFS, left // (2 * _BRIEF_BYTES)))
    briefs = {one["n"]: one for one in _listed(run, most)}
    left -= _size(list(briefs.values()))
    details: dict[int, Json] = {}
    size = 0
    for brief in _sample(run):
        if brief["n"] in details or size > left:
            continue
        found = await show_rollout(run, brief["n"])
        if found is not None:
            details[brief["n"]] = found
            size += _size(found | {"siblings": [], "same_problem": []})
    sizes = {n: _size(_within(found, details)) for n, found in details.items()}
    while details and sum(sizes[n] for n in details) > left:
        details.popitem()  # the least important one
    briefs |= {n: found["brief"] for n, found in details.items()}
    first = run.rollouts.query({"limit": "0"})
    listed = first | {"rows": [briefs[n] for n in sorted(briefs)], "details": sorted(details)}
    of_each = {f"/api/runs/0/rollouts/{n}": _within(one, details) for n, one in details.items()}
    return {"/api/runs/0/rollouts": listed} | of_each


def _within(found: Json, details: Mapping[int, Json]) -> Json:
    """A rollout, with those of its related rollouts that the file has, too."""
    related = {
        name: [one for one in found[name] if one["n"] in details]
        for name in ("siblings", "same_problem")
    }
    return found | related


def _sample(run: RunIndex) -> Iterable[Json]:
    """Rollouts to show whole, the most important first: of evenly spaced steps the best and the
    worst with their siblings, failed ones, and those of the last step."""
    first, last = run.rollouts.query({"limit": "0"})["steps"]
    if last is None:
        return
    ends = {"sort": "-reward"}, {"sort": "reward"}
    steps = {last - (last - first) * n // _MAX_SAMPLED_STEPS for n in range(_MAX_SAMPLED_STEPS)}
    for split in ("train", "evaluation"):
        for step in [last, first, *sorted(steps - {first, last})]:
            for end in ends:
                for one in _rows(run, end | {"step": step, "split": split}, 1):
                    yield one
                    yield from _rows(run, {"step": step, "group": one["group_id"]}, 8)
    failed = run.rollouts.query({"limit": "0"})["statuses"]
    for status in failed:
        yield from _rows(run, {"status": status, "sort": "-step"}, 3)
    yield from _rows(run, {"age_min": 1, "sort": "-age"}, 5)
    yield from _rows(run, {"step": last}, _MAX_LAST)


def _listed(run: RunIndex, most: int) -> Iterable[Json]:
    """Rollouts for the list, evenly spaced if there are more than ``most``."""
    total = len(run.rollouts)
    stride = max(1, -(-total // most))
    if stride == 1:
        yield from _rows(run, {}, most)
        return
    for number in range(0, total, stride):
        yield from _rows(run, {"offset": number}, 1)


def _rows(run: RunIndex, parameters: Mapping[str, Any], limit: int) -> list[Json]:
    texts = {name: str(value) for name, value in parameters.items()}
    rows: list[Json] = []
    while len(rows) < limit:
        offset = int(texts.get("offset", 0)) + len(rows)
        page = {"limit": str(limit - len(rows)), "offset": str(offset)}
        found = run.rollouts.query(texts | page)["rows"]
        if not found:
            break
        rows += found
    return rows


def _thin(values: Sequence[Any], most: int) -> list[Any]:
    """Up to ``most`` of the values, evenly spaced, with the first and the last."""
    if len(values) <= most:
        return list(values)
    last = len(values) - 1
    return [values[round(n * last / (most - 1))] for n in range(most)]


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def _size(value: Any) -> int:
    return len(msgspec.json.encode(value))


def _inlined(page: Mapping[str, str], answers: Json) -> str:
    style, script = page["app.css"], page["app.js"]
    if re.search(r"</(?:style|script)|<!--", style + script, re.IGNORECASE):
        raise ValueError("the page's files cannot be put into one file")
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    # As no character of the JSON can end the element, its texts are never markup.
    data = msgspec.json.encode(answers).decode()
    for character in "<\u2028\u2029":
        data = data.replace(character, f"\\u{ord(character):04x}")
    parts = {
        '<meta charset="utf-8">': '<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<link rel="stylesheet" href="app.css">': f"<style>{style}</style>",
        '<script src="app.js"></script>': f'<script type="application/json" id="frozen">{data}'
        f"</script>\n<script>{script}</script>",
    }
    html = page["index.html"]
    for old, new in parts.items():
        before, found, after = html.partition(old)
        if not found:
            raise ValueError(f"index.html has no {old}")
        html = before + new + after
    return html


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
