"""The pages about the specification name commands that exist, and endings that the commands have."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from dcr.cli.main import parser

DOCS = Path(__file__).parents[3] / "docs"
SPEC = DOCS.parent / "spec" / "tla"
COMMAND = re.compile(r"(?:^ *(?:\$ )?|`|/)(dcr spec [a-z][^`\n]*)", re.MULTILINE)


def commands(text):
    """Each `dcr spec ...`, with a workflow's expression replaced by its last choice."""
    return [shlex.split(re.sub(r"\$\{\{.*?'(\w+)' \}\}", r"\1", found)) for found in COMMAND.findall(text)]


@pytest.mark.parametrize(
    ("page", "least"),
    [(DOCS / "ci.md", 9), (DOCS / "ci-workflow.yml", 5), (DOCS / "protocol.md", 12), (SPEC / "README.md", 6)],
    ids=lambda x: getattr(x, "name", None),
)
def test_every_command_is_one(page, least):
    found = commands(page.read_text())
    assert len(found) >= least
    for command in found:
        parser().parse_args(command[1:])


def test_the_workflow_runs_each_command_of_the_page():
    document = yaml.safe_load((DOCS / "ci-workflow.yml").read_text())
    jobs = document["jobs"]
    page = (DOCS / "ci.md").read_text()
    assert re.findall(r"^\| (\w[\w-]*) \| `", page, re.MULTILINE) == list(jobs)
    for job in jobs.values():
        assert job["timeout-minutes"] > 0
        assert any("run" in step for step in job["steps"])
    said = "\n".join(step["run"] for step in jobs["apalache"]["steps"] if "run" in step)
    assert said.index("sha256sum --check") < said.index("tar --extract") < said.index("--checker apalache")


def test_messages_that_the_page_explains_are_those_of_the_code():
    page = (DOCS / "ci.md").read_text()
    source = "\n".join(path.read_text() for path in (DOCS.parent / "dcr" / "modelcheck").glob("*.py"))
    for said in ("did not finish within", "distinct states, found"):
        assert said in page
        assert said in source
