"""What does a job look like that checks every change: a workflow for GitHub, a pipeline for GitLab?

Both launch the model of the target branch and that of the change side by side; neither needs a token but the one that
posts the comment, which a change from a fork has not and does without.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from string import Template
from typing import Final, Literal

Host = Literal["github", "gitlab"]

JOB_FILES: Final[dict[Host, str]] = {
    "github": ".github/workflows/batchtune.yml",
    "gitlab": ".gitlab-ci.batchtune.yml",
}


class _JobTemplate(Template):
    """`@name` is filled in: `$` is the shell's and the runner's."""

    delimiter = "@"


_TORCH_FOR_CPUS: Final = "pip install torch --index-url https://download.pytorch.org/whl/cpu"
"""PyPI's brings gigabytes of CUDA, for which hosted runners have no GPU."""

_GITHUB: Final = """\
# Written by `batchtune init --ci github`. Fails a pull request that makes the served model slower; what stays
# inconclusive (exit code 5) passes with a warning, and a change that adds scenario and model, with no baseline, too.
name: batchtune
on:
  pull_request:
  push:
    branches: [main]
permissions:
  contents: read
  pull-requests: write
concurrency:
  group: batchtune-${{ github.ref }}
  cancel-in-progress: ${{ github.event_name == 'pull_request' }}
jobs:
  check:
    runs-on: ubuntu-latest
    # The check usually takes @usual beside installing. The limit is for noisy runners: all blocks, measured twice.
    timeout-minutes: @minutes
    steps:
      - uses: actions/checkout@v4
        with:
          lfs: true
      - uses: actions/checkout@v4
        if: github.event_name == 'pull_request'
        with:
          ref: ${{ github.event.pull_request.base.sha }}
          path: base
          lfs: true
      - uses: actions/setup-python@v5
        with:
          python-version: "3.12"
          cache: pip
          cache-dependency-path: "@path"
      # Another version, or none on PyPI yet: '@package @@ git+https://…', or a checkout's path, in place of @package.
      - run: @install
      - uses: actions/cache/restore@v4
        with:
          path: |
            ~/.cache/batchtune
            results/history.jsonl
            .batchtune
          key: batchtune-${{ runner.os }}-${{ github.run_id }}-${{ github.run_attempt }}
          restore-keys: batchtune-${{ runner.os }}-
      # Build or fetch both models here, where they are not in git: @model and base/@model.
      - name: Check the change against its target branch, side by side
        if: github.event_name == 'pull_request'
        run: |
          if [ ! -e base/@model ] && [ ! -e base/@scenario ] \\
            && git ls-files --error-unmatch -- @model >/dev/null 2>&1; then
            echo "::notice title=batchtune::scenario and model are new: nothing to compare with"
            exit 0
          fi
          code=0
          batchtune check @scenario --paired --baseline-model base/@model --candidate-model @model \\
            --junit batchtune.xml --comment batchtune-comment.md || code=$?
          # 5, inconclusive, is a warning on this page; `exit "$code"` alone would fail the job.
          [ "$code" -eq 5 ] || exit "$code"
      - name: Measure the baseline of main anew
        if: github.event_name == 'push'
        run: |
          mkdir -p .batchtune
          batchtune check @scenario --baseline .batchtune/baseline.json --update-baseline
      - name: Tell the pull request
        if: >-
          always() && github.event_name == 'pull_request' &&
          github.event.pull_request.head.repo.full_name == github.repository && hashFiles('batchtune-comment.md') != ''
        uses: actions/github-script@v7
        with:
          script: |
            const body = require('fs').readFileSync('batchtune-comment.md', 'utf8');
            const marker = body.split('\\n')[0];
            const place = {...context.repo, issue_number: context.issue.number};
            const comments = await github.paginate(github.rest.issues.listComments, place);
            const old = comments.find(comment => comment.body.startsWith(marker));
            if (old) await github.rest.issues.updateComment({...context.repo, comment_id: old.id, body});
            else await github.rest.issues.createComment({...place, body});
      - uses: actions/cache/save@v4
        if: always()
        with:
          path: |
            ~/.cache/batchtune
            results/history.jsonl
            .batchtune
          key: batchtune-${{ runner.os }}-${{ github.run_id }}-${{ github.run_attempt }}
      - uses: actions/upload-artifact@v4
        if: always()
        with:
          name: batchtune
          path: |
            results
            batchtune.xml
            .batchtune/baseline.json
          if-no-files-found: ignore
          include-hidden-files: true
"""

_GITLAB: Final = """\
# Written by `batchtune init --ci gitlab`. Fails a merge request that makes the served model slower; what stays
# inconclusive (exit code 5) passes with a warning, and a change that adds scenario and model, with no baseline, too.
# Add to .gitlab-ci.yml:  include: {local: .gitlab-ci.batchtune.yml}
.batchtune:
  image: python:3.12
  # The check usually takes @usual beside installing. The limit is for noisy runners: all blocks, measured twice.
  timeout: @minutes minutes
  variables:
    GIT_DEPTH: "0"
    PIP_CACHE_DIR: "$CI_PROJECT_DIR/.cache/pip"
    XDG_CACHE_HOME: "$CI_PROJECT_DIR/.cache"
  before_script:
    # Another version, or none on PyPI yet: '@package @@ git+https://…', or a checkout's path, in place of @package.
    - @install
    - |
      if git grep --quiet filter=lfs -- '*.gitattributes'; then
        apt-get update -qq
        apt-get install -qq --yes git-lfs
        git lfs install --local
      fi
  cache:
    key: batchtune
    when: always
    paths:
      - .cache
      - results/history.jsonl
      - .batchtune

batchtune-check:
  extends: .batchtune
  rules:
    - if: $CI_PIPELINE_SOURCE == "merge_request_event"
  allow_failure:
    exit_codes: [5]
  script:
    - git worktree remove --force base 2>/dev/null || rm -rf base
    - git worktree prune
    - git worktree add --detach base "$CI_MERGE_REQUEST_DIFF_BASE_SHA"
    # Build or fetch both models here, where they are not in git: @model and base/@model.
    - |
      if [ ! -e base/@model ] && [ ! -e base/@scenario ] \\
        && git ls-files --error-unmatch -- @model >/dev/null 2>&1; then
        echo "scenario and model are new: nothing to compare with"
        exit 0
      fi
    - >-
      batchtune check @scenario --paired --baseline-model base/@model --candidate-model @model
      --junit batchtune.xml --code-quality batchtune-code-quality.json --markdown batchtune.md
  artifacts:
    when: always
    paths:
      - results
      - batchtune.md
    reports:
      junit: batchtune.xml
      codequality: batchtune-code-quality.json

batchtune-baseline:
  extends: .batchtune
  rules:
    - if: $CI_COMMIT_BRANCH == $CI_DEFAULT_BRANCH
  script:
    - mkdir -p .batchtune
    - batchtune check @scenario --baseline .batchtune/baseline.json --update-baseline
  artifacts:
    paths:
      - .batchtune/baseline.json
"""


def job_text(
    host: Host, *, path: str, scenario: str, model: str, usual: str, minutes: int, extras: Sequence[str] = ()
) -> str:
    """The file for the scenario at `path`; `scenario` is that path, `model` its model, as the shell takes them;
    `extras` are those of the framework that runs it."""
    template = {"github": _GITHUB, "gitlab": _GITLAB}[host]
    package = f"batchtune[{','.join(extras)}]" if extras else "batchtune"
    install = f"pip install {shlex.quote(package)}"
    return _JobTemplate(template.replace("@v", "@@v")).substitute(
        path=path,
        scenario=scenario,
        model=model,
        usual=usual,
        minutes=minutes,
        package=package,
        install=f"{_TORCH_FOR_CPUS} && {install}" if "torch" in extras else install,
    )
