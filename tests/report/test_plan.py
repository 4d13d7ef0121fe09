"""Picture of a plan: a bar for now, and one after each remedy on top of those before it."""

from dataclasses import replace

from cs_systems.analysis.diagnosis import Answer
from cs_systems.analysis.diagnosis._findings import ON_TOP, Diagnosis, Expected
from cs_systems.report.pages import plan
from cs_systems.report.pages.tables import page

FIRST = Diagnosis("the GPU waits", "capture <a graph>", 0.1, expected=Expected(0.05, 0.04, 0.06, "replayed"))
THEN = replace(FIRST, remedy="fuse", now=0.05, expected=Expected(0.02, 0.02, 0.02, "measured"), then=ON_TOP)
ALONE = replace(FIRST, remedy="sleep", then="then, when the GPU no longer waits for the host")


def test_plan_has_a_bar_for_now_and_one_for_each_remedy_on_top() -> None:
    made = plan.bars(Answer((FIRST, ALONE, THEN)))
    assert [(bar.name, bar.value, bar.how) for bar in made] == [
        ("now", 0.1, ""),
        ("capture <a graph>", 0.05, "expected"),
        ("fuse", 0.02, "measured"),
    ]
    assert plan.bars(Answer((replace(FIRST, recorded=0.2),)))[0].name == "now, without the profiler"


def test_page_shows_the_plan_of_its_answer() -> None:
    shown = page("a page", [], answer=Answer((FIRST, THEN)))
    assert ">Plan</h2>" in shown
    assert "capture &lt;a graph&gt;: 50.0 ms; fuse: 20.0 ms" in shown
    assert "measured 20.0 ms, 5.0 times" in shown
    assert ">Plan</h2>" not in page("a page", [], answer=Answer((replace(FIRST, expected=None),)))
