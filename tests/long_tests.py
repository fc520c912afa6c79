"""Tests that ``make test`` leaves out, since they are long; ``make test-long`` runs these, and CI runs both.

Each has quicker siblings among those that are always run: another parameter of the same test, a smaller run of the
same code, or a check of the parts. Keep this list short: a test gets here for its seconds, and comes out when fast.
"""

from __future__ import annotations

#: Files below ``tests``, and of each the tests that are long: all of a test's parameters, or some by their names.
LONG: dict[str, tuple[str, ...]] = {
    # Whole comparisons; the quick ones are killed, interrupted, refused and resumed.
    "comparison/test_compare.py": (
        "test_whole_comparison_with_a_fault_in_one_method",
        "test_workers_of_their_own_and_a_killed_one",
        "test_wandb_has_a_run_each_in_one_group_with_its_ledger",
    ),
    "comparison/test_compare_table.py": ("test_shipped_comparison_is_understood[compare_fashion_mnist]",),
    "documentation/test_gallery.py": ("test_read_the_plot", "test_bring_your_own_data"),
    "planning/test_vote_search.py": ("test_init_writes_a_configuration_that_runs[own.npz]",),
    "planning/test_recommendation.py": (
        "test_recommendations_on_real_digits",
        "test_recommendations_on_the_digits_of_scikit_learn",
    ),
    "documentation/test_sweep.py": ("test_runs_of_the_sweep_are_grouped_by_what_was_swept",),
    "documentation/test_journeys.py": (
        "test_own_arrays_become_a_first_private_model",
        "test_an_auditor_finds_three_forgeries",
        "test_a_teacher_of_ones_own_runs_from_the_shell",
    ),
    # Whole runs of configurations; one of each kind of data and teacher is always run.
    "cli/test_configs.py": tuple(
        f"test_digits_config_runs[digits_{name}]"
        for name in (
            "guided_pate", "ind_knn", "noisy_sgd_teacher", "reverse_knn_local", "reverse_knn_shuffle", "simclr",
            "statistics",
        )
    ),
    "documentation/test_papers_configs.py": tuple(
        f"test_config_runs_on_small_data[{name}]"
        for name in (
            "private_knn_table1_mnist", "private_knn_table1_svhn", "private_knn_table1_cifar10",
            "private_knn_table1_cifar10_noisy_sgd", "private_knn_table3_celeba_gnmax300",
            "private_knn_table3_market1501_gnmax_sigma250", "reverse_knn_table1_cifar10_eps1.0",
            "ind_knn_table1_cifar10_private_knn", "ind_knn_table1_cifar10_noisy_sgd", "ind_knn_table5_dbpedia",
            "guided_pate_table1_cifar100_class_balanced",
        )
    ),
    "datamodules/test_fashion_attributes.py": (
        "test_config_runs_on_small_files[pate-words1]",
        "test_config_runs_on_small_files[nonprivate-words3]",
    ),
    "datamodules/test_datamodules_papers.py": (
        "test_a_round_from_the_command_line[svhn]",
        "test_a_round_from_the_command_line[market_by_person]",
    ),
    "cli/test_cli.py": ("test_wandb_offline_run_has_epsilon_and_accuracy_on_one_step_axis",),
    "baselines/test_noisy_sgd_resume.py": ("test_command_line_and_resume",),
    "labelers/ind_knn/test_ind_knn_resume.py": ("test_the_command_line_continues_and_refuses_in_one_line",),
    "labelers/pate/test_pate_report.py": (
        "test_configs_make_the_labeler_that_their_name_says[fashion_mnist_pate]",
    ),
    # Attacks of thousands of runs; smaller ones of the same kind are always run.
    "attacks/test_attack.py": (
        "test_many_honest_runs_are_accused_in_the_stated_share_of_repetitions",
        "test_an_honest_labeler_is_accused_in_the_stated_share_of_repetitions",
        "test_private_knn_in_many_runs[12.0]",
        "test_the_smallest_breach_is_found_about_as_often_as_stated",
        "test_gradients_that_are_not_clipped_are_found[sgd]",
    ),
    "attacks/test_events.py": ("test_an_honest_training_is_accused_in_the_stated_share_of_repetitions[1.0]",),
    "attacks/test_faults_are_found.py": ("test_faults_of_all_other_methods",),
    # Processes and interpreters that are started afresh.
    "testing/test_checks_in_shards.py": ("test_audits_run_through_shards",),
    "training/test_processes.py": ("test_several_processes_train_as_one_and_pay_as_one[callback-4]",),
    "documentation/test_package.py": ("test_wheel_holds_the_package_and_nothing_else",),
    "datamodules/test_datamodules.py": ("test_import_adds_nothing_heavy_to_that_of_lightning",),
    # Kills and broken disks at every call; some of each kind are always tried.
    "labelers/ind_knn/test_ind_knn_saved.py": ("test_killed_at_any_point_nothing_is_forgotten[1]",),
    "privacy/ledger/test_ledger_disk.py": (
        "test_a_charge_that_is_killed_at_any_call_is_whole_or_absent[first charge-before]",
        "test_a_charge_that_is_killed_at_any_call_is_whole_or_absent[first charge-after]",
        "test_a_charge_that_is_killed_at_any_call_is_whole_or_absent[third charge-before]",
        "test_a_charge_that_is_killed_at_any_call_is_whole_or_absent[third charge-half]",
        "test_a_disk_that_fails_loses_no_charge[EIO-False]",
        "test_a_disk_that_fails_loses_no_charge[EIO-True]",
        "test_a_disk_that_fails_loses_no_charge[ENOSPC-True]",
        "test_a_disk_that_fails_loses_no_charge[EDQUOT-False]",
        "test_a_disk_that_fails_loses_no_charge[EDQUOT-True]",
    ),
    "callbacks/test_kills_of_teachers.py": (
        "test_a_killed_run_ends_at_the_promised_epsilon[guided_pate]",
        "test_a_killed_run_ends_at_the_promised_epsilon[reverse_knn]",
        "test_a_killed_run_ends_at_the_promised_epsilon[noisy_sgd_teacher]",
    ),
    # Statistical audits of labelers that are right, and of faults that quicker audits find too.
    "testing/test_audit_labeler.py": (
        "test_honest_labelers_pass_and_half_the_noise_is_found[PrivateKNN]",
        "test_honest_labelers_pass_and_half_the_noise_is_found[IndKNN]",
    ),
    "privacy/auditing/test_empirical_audit.py": (
        "test_private_knn_accounted_with_sensitivity_one_is_found",
        "test_private_knn_stays_under_its_claim[discrete]",
        "test_private_knn_stays_under_its_claim[argmax]",
        "test_private_knn_stays_under_its_claim[screening]",
        "test_private_knn_stays_under_its_claim[screening-unsampled]",
        "test_reverse_knn_stays_under_its_claim[discrete_laplace-True]",
        "test_reverse_knn_stays_under_its_claim[discrete_laplace-False]",
    ),
    # What a student gains; its parts are checked one by one.
    "students/test_students.py": ("test_vat_beats_labels_alone_on_the_digits",),
    "students/test_pretraining.py": (
        "test_training_reads_no_label_and_leaves_a_checkpoint_of_features",
    ),
    # Files of more than one model; that of the head is always made.
    "cli/test_export.py": ("test_the_file_is_the_model_that_was_released[mean]",),
    # The accountant at the papers' sizes; small cases are compared with brute force.
    "documentation/test_papers.py": ("test_the_figure_is_drawn",),
    "privacy/accounting/test_exact.py": tuple(
        f"test_papers_parameters[{name}]"
        for name in ("8192 screenings", "8192 sampled screenings", "mnist", "mnist, sensitivity 1", "svhn", "cifar")
    ),
    "labelers/reverse_knn/test_reverse_knn_shuffle.py": (
        "test_calibration_keeps_the_target_and_wastes_little",
        "test_messages_are_shuffled_objects_with_the_distribution_of_the_simulation[shares]",
        "test_labelers_answer_and_pay_without_a_curator[shuffle-collision]",
    ),
    "labelers/test_noisy_sgd_teacher.py": ("test_target_is_met_and_agrees_with_opacus[0.5-0.02-40-2]",),
}  # fmt: skip


def is_long(node_id: str) -> bool:
    """Whether a test, by pytest's name of it, is among the long ones."""
    file, _, name = node_id.partition("tests/")[2].partition("::")
    return bool({name, name.partition("[")[0]} & set(LONG.get(file, ())))


def unknown(node_ids: list[str]) -> list[str]:
    """Names of :data:`LONG` that no test has, in the files of which there are tests."""
    found = {node_id.partition("tests/")[2] for node_id in node_ids}
    found |= {name.partition("[")[0] for name in found}
    files = {name.partition("::")[0] for name in found}
    return [f"{file}::{name}" for file in LONG if file in files for name in LONG[file]
            if f"{file}::{name}" not in found]  # fmt: skip
