"""Facts about tools that record traces agree with the profilers that start them."""

from cs_systems.config import RunConfig
from cs_systems.core import plugins
from cs_systems.core.tracers import TRACERS, tracer
from cs_systems.measure.runtime import allowance


def test_profiler_of_a_tool_starts_the_program_if_the_tool_does() -> None:
    shared = {name: plugins.get("profilers", name) for name in plugins.names("profilers") if name in TRACERS}
    assert {name: profiler.is_launcher for name, profiler in shared.items()} == {
        name: TRACERS[name].starts_program for name in shared
    }
    assert {profiler.measures for profiler in shared.values()} == {"time"}, "a step under it takes a meaningful time"


def test_slowdowns_of_launches_and_of_steps_are_known_of_the_same_tools() -> None:
    of_launches = {name for name, each in TRACERS.items() if each.inflation}
    assert of_launches == {name for name, each in TRACERS.items() if each.slower} != set()


def test_experiments_follow_under_a_tool_that_leaves_the_step_as_it_is() -> None:
    allowed = {n for n in plugins.names("profilers") if allowance.refusal(RunConfig(profiler=n)) is None}
    assert allowed == {"none", "kineto", "nsys"}
    assert allowance.refusal(RunConfig(profiler="overlap")) == "profiler overlap changes the step"


def test_unknown_tool_has_no_facts() -> None:
    assert tracer("perfetto") == tracer("") != tracer("nsys")
