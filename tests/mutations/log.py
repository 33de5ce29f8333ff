"""A pytest plugin that logs the collected tests and the outcome of each, one JSON object per line."""

import json
import os

LOG = "SCALEDOT_MUTATIONS_LOG"  # the environment variable with the path of the log


def pytest_configure(config):
    if LOG in os.environ and not hasattr(config, "workerinput"):  # workers of xdist report to their controller
        config.pluginmanager.register(_Log(os.environ[LOG]))


class _Log:
    def __init__(self, path: str):
        self.path = path

    def write(self, **entry) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(entry) + "\n")

    def pytest_collection_finish(self, session):
        self.write(collected=[item.nodeid for item in session.items])

    def pytest_collectreport(self, report):
        if report.failed:
            self.write(test=report.nodeid, outcome="collection error", seconds=0)

    def pytest_runtest_logreport(self, report):
        self.write(test=report.nodeid, outcome=report.outcome, seconds=report.duration)
