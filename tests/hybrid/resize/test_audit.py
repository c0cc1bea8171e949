"""What replicas keep from step to step and no checkpoint has: what becomes of it when one joins.

Two replicas that differ in something that they decide by diverge, or wait for each other, some
steps later, where nobody looks for it. So each field of each object that lives from step to step
stands in one table here, as one that is the same on all replicas after one has joined, or as a
replica's own.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict

import pytest

from tests.extent import first
from tests.hybrid.resize.changing_job import ChangingJob
from tests.hybrid.resize.test_resizes import MakeJob, make_job

__all__ = ["make_job"]

FIELDS: dict[str, tuple[str, str]] = {
    # the class: (fields that are the same on all, fields that are a replica's own)
    "Accumulator": (
        "_blocks _context _epochs _state _visible",
        "",
    ),
    "AccumulatorState": (
        "_changes_to_save _is_large changes changes_before name read totals",
        "_context pending",
    ),
    "AdaptiveBPTTIterator": (
        "_boundary _context _epoch_size _epochs _init_batch_size _is_fresh _learner _limits "
        "_membership _metrics _random _sample_length _state bptt_len tokens",
        "_outside",
    ),
    "AdaptiveDataLoader": (
        "_batches _boundary _context _epoch_size _epochs _init_batch_size _learner _limits _lists "
        "_membership _metrics _per_stage _random _sample_length _sampler _seed _stages _state "
        "_stream _worker_start",
        "_outside",
    ),
    "AdaptiveOptimizer": (
        "_adam _before_step _factor _is_complete _kept _may_zero _on_step _preconditioners "
        "_sharded _steps_used _warm is_stepping loss_scale optimizer",
        "_discarded _groups _trained num_steps",
    ),
    "AsyncSaver": (
        "",
        "_failure _thread",
    ),
    "BatchCheck": (
        "",
        "_batches _last _others _what",
    ),
    "BatchDigests": (
        "",
        "_calls",
    ),
    "BatchConfig": (
        "limits loop loss_scale num_microbatches proposed_microbatches scale",
        "micro_step passes trained",
    ),
    "Bucket": (
        "_complex _failure _flat _small _streams _views _work device group late launched "
        "parameters pending stage",
        "_ended _started times",
    ),
    "BufferSynchronizer": (
        "_group _layers _num_replicas _seen",
        "",
    ),
    "BufferValues": (
        "",
        "_changing _layers _once _start",
    ),
    "CarriedValues": (
        "_arriving _index _leaving _name _popped _stashed",
        "_forwards _memory _passing_shared _shared",
    ),
    "CheckpointManager": (
        "",
        "looked owner restored_from saved_step saver",
    ),
    "CommTimer": (
        "",
        "_cuda _events _latest _open _started",
    ),
    "Contributions": (
        "",
        "_batches _graphs _reached _stage _wanted",
    ),
    "ControlPlane": (
        "_agreed _group _num_replicas _place _riding timeout checks exchanges losses mesh settings",
        "_left _message last",
    ),
    "ElasticSampler": (
        "num_samples seed shuffle",
        "",
    ),
    "EpochState": (
        "_is_large began entered epoch loops_done loops_to_skip name num_epochs trainings",
        "",
    ),
    "FolderArbiter": (
        "",
        "_folder",
    ),
    "ForeignSteps": (
        "_context _digest _held _is_stepping _optimizer _steps",
        "_looked _own",
    ),
    "GradientNoiseScale": (
        "_sqr _var differenced init_batch_size num_samples preconditioned",
        "",
    ),
    "GradientSynchronizer": (
        "_averaged _batch_over_part _buffers _comm_timer _control _finite _fresh _hooks _lock "
        "_losses _measurable _measures _mesh _nonfinite _num_replicas _on_finished _on_gradient "
        "_on_settled _parameters _plans "
        "_preconditioner _reducer _reference _sqr _stages _synchronizes _task _tied _watched _wire",
        "_estimates _factors _hook_watch _loss_weight _part _samples _timed _trained _unit "
        "_unstepped _weighed",
    ),
    "HalvesCheck": (
        "",
        "_step",
    ),
    "HeaderReader": (
        "",
        "_boundary _last",
    ),
    "HeaderWriter": (
        "",
        "_last _messages",
    ),
    "HookWatch": (
        "",
        "_backwards _before _given _handles _named _names _own",
    ),
    "HostGenerators": (
        "",
        "_drawn _forwards",
    ),
    "HybridParallel": (
        "_batch _check _complete _context _deferred _elsewhere _engine _foreign "
        "_has_gradients _layer_profile _metrics _no_sync _noise _norm _normalises _optimizer "
        "_parameters_check _rule _same_samples _steps_alike _synchronizer _tied balance",
        "_digests _halves_check _inputs_check _once _result _targets_check _timing _watch",
    ),
    "InjectionCheck": (
        "",
        "_buffers _cleared _forwards _stage",
    ),
    "JobContext": (
        "batch control heartbeat joined joins mesh pipeline prepares rejoined step watch",
        "_components at_servers closers env",
    ),
    "Joining": (
        "",
        "_arrived _common _context _published _watch",
    ),
    "KeptGradients": (
        "",
        "_held _hooked _optimizer _rates _small _versions _warned _warned_of_rates",
    ),
    "LayerAttributes": (
        "",
        "_forwards _layers",
    ),
    "ElasticMembership": (
        "",
        "_announced _context _watch joining recovery totals",
    ),
    "Learning": ("learner", ""),
    "LoopState": (
        "_is_large accum_steps atomic_bsz common details identity index name",
        "",
    ),
    "LossWatch": (
        "",
        "_since",
    ),
    "MeasuredNoise": (
        "scale",
        "",
    ),
    "Measurements": (
        "",
        "accum alone backward exchange forward optim",
    ),
    "RendezvousFolder": (
        "",
        "_asked_at _beat _clock _follows _mine _posts _run _seen arbiter folder",
    ),
    "MembershipWatch": (
        "_context _suspended changing pending membership waiting_to_join place rendezvous timeout",
        "_ending _highest _looking _not_before _retired _said _signs _thread loop refused replica "
        "speaks store totals",
    ),
    "Metrics": (
        "_context _done _noise _shape _training_shape cut epoch_size overlap perf_params "
        "progress rate_factor sample_length samples samples_left shape_chosen traits",
        # What an earlier run had is looked at by the leader alone, at wrapping.
        "_checkpoints _disturbed _last_save _launched _lock _losses _part _part_ended "
        "_part_started _proposal _reporter _step_time _timed _waited limits_before "
        "order_before profile step_ratios",
    ),
    "MixingCheck": (
        "",
        "_buffers _first _names _stage",
    ),
    "NoiseMeter": (
        "_batch _measured_at _mesh _noise _optimizer _parameters _previous _steps",
        "",
    ),
    "NormSum": (
        "",
        "_factor _total _waiting",
    ),
    "OncePerIteration": (
        "places",
        "_next _part _starts",
    ),
    "OptimizerCheck": (
        "_optimizer _present _steps _used _used_words _values _words",
        "",
    ),
    "OptimizerShards": (
        "_context _moving _optimizer _owners _parameters _wanted _whole",
        "",
    ),
    "Owner": (
        "",
        "_env _file _root",
    ),
    "ParameterHooks": (
        "",
        "_arrivals _gradients _installed _on_arrival _on_gradient",
    ),
    "ParameterWatch": (
        "_count _known _layers _module _optimizer",
        "_next _places",
    ),
    "PeerLoss": (
        "expected hang_up recoverable void",
        "error noted_at",
    ),
    "PeerWatch": (
        "",
        "_addresses _connections _end _ended _ended_here _env _frozen _hosts _lost _needs_all "
        "_news _pause _shared _spared _standstill _thread timeout word",
    ),
    "PipelineEngine": (
        "_guards _layout checkpoint devices stages",
        "_copy_streams",
    ),
    "PipelineSpec": (
        "checkpoint_mode chunks_per_stage devices fewest_samples microbatches_follow num_stages "
        "schedule shards_optimizer",
        "",
    ),
    "ProcessEngine": (
        "_carrier _check_peers _group _kind _names _row checkpoint chunks device index num_stages "
        "stages",
        "_failure _loss _schedules _step notes",
    ),
    "ProcessMesh": (
        "_among _ranks _wait calls column num_stages replicas row stage stages",
        "within",
    ),
    "ProcessStageTimer": (
        "_engine _mesh",
        "_notes",
    ),
    "PublishedTotals": (
        "",
        "_folder _lock _written",
    ),
    "RandomState": (
        "_context _is_large _root name",
        "_remembered _restored _states",
    ),
    "Recovery": (
        "",
        "_arbiter _context _losses _undo _watch",
    ),
    "Reducer": (
        "_bucket_bytes _bucket_of _buckets_wanted _dtype _group _hold _next _numbers "
        "_shared _surprising _trained _unused buckets overlap",
        "_passes _separate _weight counts",
    ),
    "ReplicaCalls": (
        "",
        "_group _replica _stage",
    ),
    "ParameterCheck": (
        "_compared _context _module _step _stepped _warned",
        "",
    ),
    "ReplicaCheck": (
        "_control _interval _module _tied",
        "_env",
    ),
    "ReplicaGroup": (
        "known process_group size",
        "connections",
    ),
    "Reporter": (
        "",
        "_backoff _context _display _fault _held _hints _hints_of _last_point _listeners "
        "_lock _losses _metrics _next_hints _next_report _pace _points _retry_at _senders _stop "
        "_thread _timeline _unshown _url",
    ),
    "RunningAverage": (
        "total weight",
        "",
    ),
    "SameAgain": (
        "",
        "_forwards _layers _stage",
    ),
    "SameSamples": (
        "_context _digest _pending",
        "",
    ),
    "SampleStream": (
        "",
        "_dataset _reader _request",
    ),
    "ShardedStep": (
        "_hidden _optimizer _shards",
        "",
    ),
    "SignsOfLife": (
        "",
        "_clock _interval _last _limit _seen",
    ),
    "Stage": (
        "_in_place device index output_name skips",
        "differentiates",
    ),
    "StageGuards": (
        "buffers",
        "_generators _injections _mixing attributes changes contributions same",
    ),
    "StageNotes": (
        "",
        "_clock _computed _open _spans",
    ),
    "StageProfiler": (
        "_out_of_turn",
        "_countdown _devices _metrics _recording _step _timer _tracer",
    ),
    "StateChanges": (
        "",
        "_batches _buffers _deferred _layers _stage _warned",
    ),
    "StageTimer": (
        "",
        "_clock _counts _devices _handles _num_recomputed _spans _stages",
    ),
    "Standstill": (
        "",
        "_clock _last _seconds _until",
    ),
    "StepBoundary": (
        "_agreed _context _membership _metrics",
        "",
    ),
    "StepProfile": (
        "",
        # Only the leader, which fits, drops any of what was inherited.
        "_inherited _latest _lock _measurements _settled _to_skip",
    ),
    "StepTimes": (
        "",
        "_disturbed _quiet",
    ),
    "StreamCheck": (
        "_compared _marks",
        "_leads",
    ),
    "Tracer": (
        "",
        "_context _next _path",
    ),
    "Undo": (
        "",
        "_context _random _remembered",
    ),
    "TiedCopies": (
        "_added_up _contributions _counted_elsewhere _mesh _mine _shared _stage",
        "_seconds _slowest _timer",
    ),
    "Trained": (
        "",
        "flags stages",
    ),
    "WorkerStart": ("_then", "ends_along"),
    "_Counts": (
        "",
        "forward open recomputed",
    ),
    "_Holder": (
        "",
        "membership",
    ),
    "_Lists": (
        "",
        "source",
    ),
    "_Reader": (
        "",
        "_ahead _samples epoch index",
    ),
    "_Seen": (
        "",
        "beat since",
    ),
    "_Sign": (
        "",
        "sign silent",
    ),
    "_Span": (
        "",
        "end microbatch phase stage start",
    ),
}
"""Own are measured times, what only replica 0 shows and sends, connections, random numbers, a share
of a batch, and what is made anew before it is used."""
OF_ONE_REPLICA = {
    "Interleaved",
    "RemoteLayer",
    "ProcessStage",
    "_Forward",
    "_Layers",
    "_OneForwardOneBackward",
}
"""Classes, most with fields of torch's, whose objects only the processes of one replica drive
together: these have all stayed, or all joined."""
JOINED = 9
"""A step after the joining replica's first one."""


def parts(key: str) -> tuple[str, str]:
    found = re.fullmatch(r"(\w+)\[\d+\]\.(.*)", key)
    assert found is not None
    return found[1], found[2]


@pytest.mark.parametrize("kind", first(1, ["accumulation", "text", "stream", "workers"]))
def test_of_each_field_it_is_known_whether_it_is_the_same_on_all_after_a_join(
    make_job: MakeJob, kind: str
) -> None:
    """The comparison of replicas at every third step would wait for ever if they counted apart."""
    settings = {"EPOCHS": "1", "PIPOLLUX_CHECK_REPLICAS": "3"}
    job = make_job(DATA=kind, CHANGES="5", AUDITED=str(JOINED), **settings)
    job.begin(1)
    job.wait_until_at(5)
    job.add()
    job.wait()
    check_fields(job, stage=0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_so_it_is_where_each_stage_has_a_process(make_job: MakeJob, schedule: str) -> None:
    settings = {"PROCESSES": "2", "SCHEDULE": schedule, "LAYERS": "tied"}
    job = make_job(CHANGES="5", AUDITED=str(JOINED), PIPOLLUX_CHECK_REPLICAS="3", **settings)
    job.begin(1)
    job.wait_until_at(5)
    job.add_stages()
    job.wait()
    for stage in range(2):
        check_fields(job, stage)


def check_fields(job: ChangingJob, stage: int) -> None:
    """Compare what the two replicas of a job have kept."""
    stays, joins = (
        json.loads((job.results / f"audit-{rank}-{stage}.json").read_text()) for rank in range(2)
    )
    found: dict[str, set[str]] = defaultdict(set)
    for key in {**stays, **joins}:
        kind_of, field = parts(key)
        if kind_of not in OF_ONE_REPLICA:
            found[kind_of].add(field)
    assert {"GradientSynchronizer", "NoiseMeter", "AdaptiveOptimizer", "Metrics"} <= found.keys()
    for name, fields in found.items():
        same, own = (set(words.split()) for words in FIELDS.get(name, ("", "")))
        new = sorted(fields - same - own)
        assert not new, (
            f"{name}.{new[0]} is not in FIELDS: say there whether it is the same on all replicas "
            "after one has joined (and see to it: save it in a State, or set it anew in "
            "`rejoined`), or a replica's own, which nothing that replicas do together may follow"
        )
        gone = sorted((same | own) - fields)
        assert not gone, f"{name} has no {gone[0]} any more: remove it from FIELDS"
    for key, word in stays.items():
        name, field = parts(key)
        if name in found and field in FIELDS[name][0].split():
            assert joins.get(key) == word, (
                f"{key} differs between one that stays and one that joins"
            )
