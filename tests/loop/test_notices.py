"""A line that nobody would see in a log is written where it is seen."""

import logging

from atoll.loop.notices import say


def test_without_logging_a_line_goes_to_stderr_and_with_it_to_the_log_alone(monkeypatch, capsys):
    log = logging.getLogger("atoll")
    monkeypatch.setattr(log, "propagate", False)  # pytest has handlers above it
    say("something")
    assert capsys.readouterr().err == "atoll: something\n"
    silent = logging.NullHandler()
    log.addHandler(silent)
    try:
        say("something else")
    finally:
        log.removeHandler(silent)
    assert capsys.readouterr().err == ""


def test_where_logging_is_set_up_a_line_is_an_entry_of_it(caplog):
    with caplog.at_level(logging.INFO, "atoll"):
        say("something")
    assert caplog.messages == ["something"]
