"""What the engine counts. Plain numbers, written by the engine's thread; a server turns them into its metrics."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Metrics:
    """Counters since the start, and (below) gauges as of the last step."""

    steps: int = 0
    failed_steps: int = 0
    requests: int = 0  # API requests taken in
    admissions: int = 0  # completions and scorings that got a row by the way of the waiting list
    resumptions: int = 0  # held rows that were continued: no admission
    retractions: int = 0
    aborted: int = 0
    failed: int = 0
    prompt_tokens: int = 0  # of admitted rows
    cached_tokens: int = 0  # of those, found in the cache
    computed_tokens: int = 0  # new tokens of all steps
    completion_tokens: int = 0
    forced_tokens: int = 0
    guessed_runs: int = 0  # forced texts that entered before the token in front of them was known
    wrong_guesses: int = 0  # and those of them that did not follow
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    stale_tokens: int = 0  # sampled for a row that had ended one step before
    late_tokens: int = 0  # drawn a step later, since their mask was not there
    evicted_pages: int = 0
    held_token_steps: int = 0  # room for that many tokens was held by running rows, summed over all steps
    computed_token_steps: int = 0  # and that many had their KV there; more than held where rows share prefixes
    accounting_problems: int = 0  # found by check_invariants
    finish_reasons: dict[str, int] = field(default_factory=dict)

    running: int = 0
    waiting: int = 0
    waiting_grammar: int = 0
    held: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_protected: int = 0
    pages_owned: int = 0

    step_s: float = 0.0  # whole turns that had a step, seconds, ever
    schedule_s: float = 0.0  # time in each phase of the step, seconds, ever
    forward_s: float = 0.0
    mask_s: float = 0.0
    sample_s: float = 0.0
    wait_s: float = 0.0
    apply_s: float = 0.0

    def count_finish(self, reason: str) -> None:
        self.finish_reasons[reason] = self.finish_reasons.get(reason, 0) + 1
