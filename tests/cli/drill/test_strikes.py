from __future__ import annotations

from typing import cast

from lightning_faulttolerant.cli.drill.ledgers import BatchNumbers
from lightning_faulttolerant.cli.drill.process import DrillProcess
from lightning_faulttolerant.cli.drill.strikes import stretches_of, strikes_of
from tests.cli.drill.made import StruckProcess, begun, fit_lines, resumed, whole


def strikes(*processes: StruckProcess) -> list[tuple[int, int, int, str]]:
    """Return, for each strike that counts, where it hit, where it resumed, the repeated batches, and the hook."""
    stretches = stretches_of(cast("list[DrillProcess]", list(processes)), BatchNumbers(whole()[0].batches))
    return [(s.at, s.resumed_at, s.num_twice, s.hook) for s in strikes_of(stretches, "exception")]


def test_restarts_by_a_launcher_count_as_those_of_the_drill() -> None:
    """Ranks that a launcher restarts in one process count as struck, as if the drill had started them."""
    first, second = [begun(), *fit_lines()[:6]], [begun(pid=2), resumed(0, 2), *fit_lines(start=(0, 2))[:10]]
    third = [begun(pid=3), resumed(1, 1), *fit_lines(start=(1, 1))]
    expected = [(3, 2, 1, "start"), (6, 5, 1, "end")]
    assert strikes(StruckProcess([*first, *second, *third], hooks=("start", "end"))) == expected
    apart = [StruckProcess(first, hooks=("start",)), StruckProcess(second, hooks=("end",)), StruckProcess(third)]
    assert strikes(*apart) == expected


def test_a_strike_after_which_nothing_was_gained_does_not_count() -> None:
    """A process that gets no further than its start proves nothing, so its strike is ignored."""
    first = [begun(), *fit_lines()[:6]]
    same, further = [begun(pid=2), resumed(0, 2)], [begun(pid=3), resumed(0, 2), *fit_lines(start=(0, 2))]
    assert strikes(StruckProcess(first), StruckProcess(same), StruckProcess(further)) == [(3, 2, 1, "")]
    assert strikes(StruckProcess(first), StruckProcess([begun(pid=2), *fit_lines()])) == []
