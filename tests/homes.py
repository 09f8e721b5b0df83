"""Where modules are tested that have no file of tests of their own name."""

# By the path of tests below tests/, the modules of `tf_dgc` that it tests.
TESTED_IN: dict[str, str] = {
    "jobs/test_downpour": """exchanges.local_gradients exchanges.rates
        servers.clocks servers.pulse servers.succession
        strategies.common_steps strategies.embeddings strategies.following
        strategies.on_servers strategies.pieces
        strategies.served_fits strategies.served_inner strategies.served_share
        strategies.served_training""",
    "jobs/test_elastic": "transports.generation",
    "jobs/test_features": """_host.datasets _host.distribute _host.iterators
        _host.keras strategies.adopted strategies.agreement strategies.base
        strategies.exchanging strategies.inner strategies.witness transports.hybrid""",
    "jobs/test_horovod_front_ends": """horovod.compressor horovod.core
        horovod.normalization horovod.optimizer horovod.tape""",
    "jobs/test_other_device": "_host.tensorflow",
    "jobs/test_server_faults": "servers.progress strategies.kept",
    "jobs/test_serving": "servers.cluster",
    "jobs/test_split_training": """layers.away layers.dense layers.movement
        layers.products""",
    "jobs/test_stops": "strategies.snapshot strategies.stopping",
    "jobs/test_verify": """verify.command verify.quiet verify.recording
        verify.step_notes""",
    "lab/test_advise": "lab.measure lab.rates lab.splitting layers.ways",
    "lab/test_launch": "launcher.call launcher.function launcher.workers",
    "lab/test_placement": "lab.kernels",
    "lab/test_run_faults": "launcher.agent launcher.leftovers",
    "lab/test_run_servers": "launcher.door",
    "lab/test_run_trials": "launcher.apart",
    "laws/test_exchange_contract": """exchanges.base exchanges.compressed
        exchanges.dense exchanges.held_back exchanges.large_tensors exchanges.moved
        exchanges.served exchanges.server_traffic exchanges.small_tensors
        exchanges.synchronous""",
    "laws/test_flights": "exchanges.channel exchanges.flight_state",
    "laws/test_owners": """compression.regions exchanges.owned
        exchanges.owner_messages exchanges.owner_sum transports.sums""",
    "laws/test_ratios": "exchanges.formats",
    "laws/test_sites": "exchanges.at_site",
    "laws/test_simulate": "strategies.one_by_one",
    "laws/test_transports": """transports.base transports.gathering transports.grid
        transports.local transports.named_calls""",
    "unit/test_averaging_strategy": """strategies.averaging_inner
        strategies.combining strategies.outer""",
    "unit/test_auto": """prediction.calibration prediction.choices prediction.costs
        strategies.auto_inner""",
    "unit/test_backups": "strategies.calls strategies.within_epoch",
    "unit/test_callbacks": "strategies.epoch_ends",
    "unit/test_check": "check.command check.facts check.links check.meeting",
    "unit/test_data": """exchanges.parts strategies.distribution
        strategies.first_builds strategies.slicing""",
    "unit/test_dgc": """exchanges.applied exchanges.arenas exchanges.figures
        exchanges.residual""",
    "unit/test_elements": "strategies.batch_rows",
    "unit/test_horovod_names": "horovod.options",
    "unit/test_losses": """strategies.cuts strategies.formulas strategies.judgement
        strategies.known strategies.loss_sums strategies.number_terms
        strategies.readings strategies.row_axes strategies.row_rules
        strategies.row_shapes strategies.totals""",
    "unit/test_output": "launcher.job",
    "unit/test_own_batches": "strategies.handed_over",
    "unit/test_own_steps": """strategies.conditions strategies.context
        strategies.current strategies.early strategies.uses""",
    "unit/test_package": "_host.probe version",
    "unit/test_provenance": "strategies.data_graphs",
    "unit/test_parameter_averaging": """exchanges.anchors exchanges.averaged
        exchanges.modes exchanges.period_steps exchanges.periods exchanges.progress
        exchanges.rounds exchanges.settled""",
    "unit/test_outside": "strategies.unused",
    "unit/test_patches": "_host.applying",
    "unit/test_pushed": """exchanges.selecting exchanges.server_arena
        exchanges.stage_selection""",
    "unit/test_ledger": "exchanges.opened",
    "unit/test_records": "strategies.core strategies.states",
    "unit/test_reports": "transports.waiting",
    "unit/test_rendezvous": """transports.leaving transports.peers
        transports.presence""",
    "unit/test_resolver": "transports.mesh",
    "unit/test_scope": "strategies.extended strategies.watched",
    "unit/test_scopes": "strategies.fits",
    "unit/test_screen": "launcher.terminals launcher.transcript launcher.warned",
    "unit/test_script": "_host.startup launcher.settings",
    "unit/test_oracles": """imported search.chief search.groups search.studies
        search.tuners""",
    "unit/test_servers": """servers.chief_records servers.members servers.places
        servers.shards
        strategies.served strategies.served_data""",
    "unit/test_share": """strategies.applied_gradients strategies.backward
        strategies.logs strategies.means strategies.rows strategies.step_hooks
        strategies.step_warnings strategies.weights""",
    "unit/test_split": "strategies.positions strategies.rowwise",
    "unit/test_split_layers": """bands exchanges.split_files layers.draws
        layers.logits layers.refusals layers.trials""",
    "unit/test_split_models": "layers.models",
    "unit/test_stamps": "compression.halves servers.shared servers.stamped_part",
    "unit/test_strategy": """step strategies.made_variables strategies.one_device
        strategies.reductions transports.collective transports.horovod""",
    "unit/test_tables": "_host.shared _host.stores",
    "unit/test_timeline": "strategies.marks",
    "unit/test_served_rounds": """exchanges.handover exchanges.local_counts
        exchanges.outer_on_servers exchanges.own_changes
        exchanges.served_messages exchanges.server_copies""",
    "unit/test_turns": """exchanges.together servers.arrivals servers.attendance
        servers.holders servers.meetings servers.quorum""",
    "unit/test_watchdog": "transports.turnstile",
    "unit/test_without_rows": "_host.flow",
}
