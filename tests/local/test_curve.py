import struct

from marlaas.plots.figure import draw_curve


def _size(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", png[16:24])


def test_a_curve_is_a_png_that_can_be_read_on_a_page(document, step, evaluation):
    steps = [step(document(), n, staleness_mean=0.5, staleness_max=1, metrics={"tokens": 512.0}) for n in range(5)]
    width, height = _size(
        draw_curve("team-a/reverse", steps, [evaluation(document(), 0, 0.1), evaluation(document(), 5, 0.9)], 8)
    )
    assert width >= 1000
    assert height >= 700


def test_a_job_that_never_finished_a_step_has_a_curve_too(document, evaluation):
    assert _size(draw_curve("team-a/reverse", [], [], 8))
    assert _size(draw_curve("team-a/reverse", [], [evaluation(document(), 0, 0.1)], 8))


def test_a_single_step_and_a_step_without_signal_are_drawn(document, step):
    assert _size(draw_curve("team-a/reverse", [step(document(), 0, num_groups=0)], [], 8))
