"""What is tested, and by which tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_RUN: Final = "tests/run"
_MEANS: Final = f"{_RUN}/stage/loss_checks/test_batch_loss_check.py"
_STEP: Final = f"{_RUN}/stage/loss_checks/test_step_loss_check.py"
_WHOLE: Final = f"{_RUN}/test_whole_batch.py"
_SAVED: Final = f"{_RUN}/checkpoint"
_KILLED: Final = f"{_RUN}/engine/test_pipeline_failures.py"
_INPUT: Final = f"{_RUN}/engine/test_pipeline_input.py"
_REPORT: Final = f"{_RUN}/diagnostics/test_failure.py"
_LOST: Final = f"{_RUN}/comm/test_transport_failures.py"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the page.

    Args:
        what: what is tested, and what is expected.
        file: the file of the tests.
        tests: their names.
        table: the dict of the file whose keys the line lists; none if empty.
        times: the number, or the table, in the file that says how often each case is
            repeated with something else; once if empty.
    """

    what: str
    file: str
    tests: tuple[str, ...]
    table: str = ""
    times: str = ""


LOSSES: Final = (
    Row("A mean over samples or words: trained", _MEANS, ("test_means_pass",), "MEANS"),
    Row(
        "A weighted mean with drawn sizes, weights and padding, as a `TokenMean`: "
        "trained",
        _STEP,
        ("test_weighted_means_pass_as_token_means",),
    ),
    Row(
        "A loss that compares samples, found by its value: refused",
        _MEANS,
        ("test_losses_that_compare_samples_are_refused",),
        "COMPARING",
    ),
    Row(
        "A loss of the whole batch, found by its gradients alone: refused",
        _STEP,
        ("test_losses_of_the_whole_batch_are_refused",),
        "OF_THE_BATCH",
    ),
    Row("A sum over samples: refused", _MEANS, ("test_sums_are_refused",)),
    Row(
        "A loss that the check cannot try: accepted, and named here",
        _MEANS,
        ("test_what_cannot_be_tried_is_not_judged",),
        "UNTOLD",
    ),
    Row(
        "`hocket.WholeBatch`, on one to four workers: equal to the plain loop",
        _WHOLE,
        ("test_equals_the_plain_loop", "test_equals_the_plain_loop_on_several_workers"),
        "LOSSES",
    ),
    Row(
        "`hocket.TokenMean`, with class weights and ignored targets: equal to the "
        "plain loop over whole batches",
        f"{_RUN}/test_token_mean.py",
        ("test_equals_the_plain_loop_over_whole_batches",),
    ),
    Row(
        "The same loss undeclared: refused, with the difference",
        f"{_RUN}/test_token_mean.py",
        ("test_the_first_step_is_refused_without_it",),
    ),
)

OPTIMIZERS: Final = (
    Row(
        "Saved in three stages with its schedule of rates, gone on with in two",
        f"{_SAVED}/test_optimizers.py",
        ("test_trains_and_goes_on_in_other_stages",),
        "WAYS",
    ),
    Row(
        "Bytes of its state, beside those of a real step",
        "tests/model/profile/test_optimizer_bytes.py",
        ("test_state_is_what_a_real_step_leaves",),
        "OPTIMIZERS",
    ),
    Row(
        "Steps of each parameter by itself: trained",
        f"{_RUN}/weights/test_step_check.py",
        ("test_steps_of_each_parameter_by_itself_pass",),
    ),
    Row(
        "Steps that look at all parameters: refused",
        f"{_RUN}/weights/test_step_check.py",
        ("test_steps_of_all_parameters_together_are_refused",),
    ),
)

FAULTS: Final = (
    Row(
        "Learning rates and losses that differ by rank: refused on every rank",
        f"{_RUN}/engine/test_differing_ranks.py",
        ("test_all_ranks_raise_it",),
    ),
    Row(
        "Orders with an op dropped, doubled, moved or renumbered: found by the checker",
        "tests/core/test_check_against_slow.py",
        ("test_ops_are_counted_as_they_are_looked_at_one_by_one",),
    ),
    Row(
        "Orders with ops dropped, doubled, moved or exchanged: refused, or harmless",
        "tests/core/test_check.py",
        ("test_rejects_random_damage", "test_a_swap_is_rejected_or_harmless"),
    ),
    Row(
        "Files of orders, nearly right: read, or refused with the line",
        "tests/core/test_text.py",
        ("test_every_error_names_a_line",),
    ),
    Row(
        "Timelines with any value at any place: read, or refused with the entry",
        "tests/core/test_timeline_json.py",
        ("test_no_other_error_whatever_stands_in_the_file",),
    ),
    Row(
        "Checkpoints with one bit flipped: the file is named",
        f"{_SAVED}/test_corruption.py",
        ("test_any_flipped_bit_is_found_and_its_file_named",),
        times="NUM_FLIPS",
    ),
    Row(
        "Checkpoints with a file cut off: the file is named",
        f"{_SAVED}/test_corruption.py",
        ("test_any_truncation_is_found_and_its_file_named",),
        times="NUM_CUTS",
    ),
    Row(
        "Saves killed at each call of the system, at least so many: a whole "
        "checkpoint is there",
        f"{_SAVED}/test_crash.py",
        ("test_killed_at_any_call_the_folder_has_a_whole_checkpoint",),
        times="MIN_CALLS",
    ),
    Row(
        "Optimizer states of a wrong kind: refused, and nothing changes",
        f"{_SAVED}/test_states.py",
        (
            "test_states_of_a_wrong_kind_change_nothing",
            "test_any_value_anywhere_is_loaded_or_refused",
        ),
    ),
    Row(
        "Workers killed at an op, in a wait, in evaluation, at the start: the others "
        "end, and name it",
        _KILLED,
        (
            "test_the_others_end_after_a_kill",
            "test_the_others_end_after_a_kill_outside_of_training",
        ),
    ),
    Row(
        "Other processes that connect to a worker, and send garbage: turned away",
        f"{_RUN}/comm/test_transport_failures.py",
        ("test_strangers_and_what_they_send_are_turned_away",),
        times="NUM_STRANGERS",
    ),
    Row(
        "Workers that hang: found after the timeout, and named",
        _KILLED,
        ("test_the_others_end_when_one_hangs",),
    ),
    Row(
        "Errors in the user's code; losses that are no numbers: first in the report, "
        "no weight changes",
        _KILLED,
        (
            "test_an_error_in_the_users_code_is_named_first",
            "test_a_loss_that_is_no_number_changes_no_weight",
        ),
    ),
    Row(
        "Workers that raise, crash, exit or hang, as the launcher reports them",
        _REPORT,
        ("test_who_fails_is_on_top", "test_a_hung_worker_is_found_and_ended"),
    ),
    Row(
        "Workers killed with restarts: the job ends with the weights of one unharmed",
        f"{_RUN}/cluster/test_restart.py",
        ("test_a_killed_worker_is_replaced",),
    ),
    Row(
        "Settings, of which one can be: the others are refused before the start",
        _INPUT,
        ("test_settings_are_refused_before_the_start",),
        times="SETTINGS",
    ),
    Row(
        "Batches that cannot be: refused by every worker, and training goes on",
        _INPUT,
        ("test_bad_batches_change_nothing",),
        times="BATCHES",
    ),
    Row(
        "Senders and receivers killed or stopped: the other end knows, by message "
        "and rank",
        _LOST,
        (
            "test_a_receiver_learns_at_once_that_its_sender_was_killed",
            "test_a_sender_learns_at_once_that_its_receiver_was_killed",
            "test_a_stopped_worker_is_waited_for_until_the_timeout",
        ),
    ),
    Row(
        "Connections by a process of another user: turned away",
        f"{_RUN}/comm/test_link.py",
        ("test_other_users_are_turned_away",),
    ),
)
