"""Which messages are known and which are not, what a whole log comes to, and that no line can make it slow."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detectors.findings import Certainty, Class, Role
from detectors.observations import Line, Stream
from detectors.signatures import EVERY, REMEMBERED_MAX, SEEN_MAX, TEXT_MAX, Signature, Signatures, Table, TableError

TABLE = Table.load()

KNOWN = [
    # GPUs and nodes
    ("NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", "xid_79"),
    ("NVRM: Xid (PCI:0000:3b:00): 94, pid=4711, name=python, Contained: SM (0x1)", "xid_94"),
    ("[12345.678901] NVRM: Xid (0000:17:00): 13, Graphics Exception: ESR 0x50d730=0x10004", "xid_13"),
    ("NVRM: Xid (PCI:0000:3b:00): 777, something new", "xid_other"),
    ("NVRM: GPU at PCI:0000:3b:00: GPU-6d1f has fallen off the bus", "gpu_lost"),
    ("Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost.  Reboot the system to recover this GPU", "gpu_lost"),
    ("NVRM: RmInitAdapter failed! (0x26:0x56:1463)", "nvrm_init_failed"),
    ("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 46 LTSSM Fault Up", "nvswitch_fatal"),
    ("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 11012, Non-fatal, Link 46 egress", "nvswitch_error"),
    ("EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0", "edac_uncorrected"),
    ("EDAC MC1: 12 CE memory scrubbing error on CPU_SrcID#1", "edac_corrected"),
    ("mce: [Hardware Error]: CPU 12: Machine check events logged", "machine_check"),
    ("watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python:4711]", "kernel_lockup"),
    ("INFO: task python:4711 blocked for more than 120 seconds.", "kernel_hung_task"),
    ("rcu: INFO: rcu_sched self-detected stall on CPU", "kernel_stall"),
    ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "cuda_ecc"),
    ("pcieport 0000:16:02.0: AER: Uncorrected (Fatal) error received: 0000:17:00.0", "pcie_fatal"),
    # host memory
    ("Out of memory: Killed process 4711 (python) total-vm:81234567kB, anon-rss:64000000kB", "oom_killed"),
    ("Memory cgroup out of memory: Killed process 4711 (python) total-vm:1kB", "oom_killed"),
    ("python invoked oom-killer: gfp_mask=0x100cca(GFP_HIGHUSER_MOVABLE), order=0", "oom_killed"),
    ("slurmstepd: error: Detected 1 oom_kill event in StepId=123.0. Some of the step tasks have been OOM Killed.", "oom_slurm"),
    ("slurmstepd: error: Detected 2 oom-kill event(s) in StepId=9.batch cgroup.", "oom_slurm"),
    ("srun: error: node7: task 0: Out Of Memory", "oom_slurm"),
    ("RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed. ", "loader_killed"),
    ("RuntimeError: DataLoader worker (pid(s) 10, 11) exited unexpectedly", "loader_died"),
    ("ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).", "loader_bus_error"),
    (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:114] data. DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000000000000 bytes.",
        "memory_exhausted",
    ),
    ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 29.8 GiB for an array with shape (4000000000,)", "memory_exhausted"),
    ("terminate called after throwing an instance of 'std::bad_alloc'", "memory_exhausted"),
    ("OSError: [Errno 12] Cannot allocate memory", "memory_exhausted"),
    ("MemoryError", "python_memory"),
    # GPU memory and CUDA
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB", "cuda_out_of_memory"),
    ("RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 31.75 GiB total capacity)", "cuda_out_of_memory"),
    ("[rank3]: torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB", "cuda_out_of_memory"),
    ("RuntimeError: CUDA error: out of memory", "cuda_out_of_memory"),
    ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "cuda_out_of_memory"),
    ("node1:10:20 [0] include/alloc.h:48 NCCL WARN Cuda failure 'out of memory'", "cuda_out_of_memory"),
    ("jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.", "cuda_out_of_memory"),
    ("RuntimeError: CUDA error: device-side assert triggered", "cuda_device_assert"),
    (
        "../aten/native/cuda/Loss.cu:250: nll_loss_forward: block: [0,0,0], thread: [3,0,0] Assertion `t >= 0 && t < n_classes` failed.",
        "cuda_device_assert",
    ),
    ("RuntimeError: CUDA error: an illegal memory access was encountered", "cuda_illegal_access"),
    ("RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "cuda_error"),
    ("RuntimeError: CUDA error: unknown error", "cuda_error"),
    ("RuntimeError: No CUDA GPUs are available", "cuda_setup"),
    ("RuntimeError: CUDA error: no kernel image is available for execution on the device", "cuda_setup"),
    ("AssertionError: Torch not compiled with CUDA enabled", "cuda_setup"),
    ("RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!", "device_mismatch"),
    ("RuntimeError: Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same", "device_mismatch"),
    ("RuntimeError: module must have its parameters and buffers on device cuda:0 (device_ids[0]) but found one of them on device: cpu", "device_mismatch"),
    ("TypeError: can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first.", "device_mismatch"),
    ("RuntimeError: Expected a 'cuda' device type for generator but found 'cpu'", "device_mismatch"),
    ("RuntimeError: indices should be either on cpu or on the same device as the indexed tensor (cpu)", "device_mismatch"),
    ("RuntimeError: Input type (c10::Half) and bias type (float) should be the same", "runtime_error"),
    ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", "cuda_illegal_access"),
    ("RuntimeError: Triton Error [CUDA]: out of memory", "cuda_out_of_memory"),
    ("Memory access fault by GPU node-1 (Agent handle: 0x1) on address 0x7f. Reason: Unknown.", "cuda_illegal_access"),
    ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "driver_unreachable"),
    # numerics
    ("step 120 | loss nan | lr 1e-4", "loss_not_finite"),
    ("epoch 3 train_loss=nan val_loss=2.3", "loss_not_finite"),
    ("{'loss': nan, 'learning_rate': 1e-05, 'epoch': 0.1}", "loss_not_finite"),
    ("Loss is nan, stopping training", "loss_not_finite"),
    ("ValueError: loss became NaN at step 42", "loss_not_finite"),
    ("RuntimeError: NaN loss detected at iteration 9", "loss_not_finite"),
    ("FloatingPointError: NaN or Inf detected in gradients", "loss_not_finite"),
    ("RuntimeError: Function 'MulBackward0' returned nan values in its 0th output.", "loss_not_finite"),
    ("Epoch 1 [100/1000] Loss: tensor(nan, device='cuda:0', grad_fn=<NllLossBackward0>)", "loss_not_finite"),
    ("FloatingPointError: Minimum loss scale reached (0.0001). Your loss is probably exploding.", "loss_scale_collapsed"),
    ("Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.", "loss_scale_collapsed"),
    (" iteration 9/ 10 | lm loss: 6.5E+00 | number of skipped iterations:   0 | number of nan iterations:   1 |", "nan_iterations"),
    ("{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 2e-05}", "gradient_not_finite"),
    ("RuntimeError: probability tensor contains either `inf`, `nan` or element < 0", "loss_not_finite"),
    ("2026-01-01 - mmdet - INFO - Epoch [1][50/7330] loss_cls: nan, loss_bbox: 0.3", "loss_not_finite"),
    # collectives
    (
        "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE) ran for 600123 milliseconds before timing out.",
        "collective_timeout",
    ),
    ("RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:1269, unhandled system error, NCCL version 2.14.3", "nccl_error"),
    ("ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.", "nccl_remote"),
    ("torch.distributed.DistBackendError: NCCL error in: x.cpp:1, remote process exited or there was a network error, NCCL version 2.18", "nccl_remote"),
    ("ncclInvalidUsage: This usually reflects invalid usage of NCCL library.", "nccl_invalid"),
    ("n1:7:9 [0] init.cc:521 NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 6000", "nccl_duplicate_gpu"),
    ("n1:7:9 [0] NCCL WARN NET/IB : Got completion from peer 10.0.0.2<4711> with error 12, opcode 0, len 0, vendor err 129", "nccl_ib_error"),
    ("n1:7:9 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-x: No space left on device", "disk_full"),
    ("RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.3]:4711", "peer_connection_lost"),
    ("RuntimeError: [/gloo/transport/tcp/pair.cc:590] Read error [10.0.0.3]:4711: Connection reset by peer", "peer_connection_lost"),
    ("RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete", "gloo_timeout"),
    ("torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, EADDRINUSE", "address_in_use"),
    ("RuntimeError: Rank 3 failed to pass monitoredBarrier in 30000 ms", "barrier_missed"),
    ("RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: X", "collective_mismatch"),
    ("ConnectionRefusedError: [Errno 111] Connection refused", "peer_connection_lost"),
    ("torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 1/2 clients joined.", "gloo_timeout"),
    ("torch.distributed.elastic.multiprocessing.api.SignalException: Process 4711 got signal: 15", "asked_to_stop"),
    # crashes
    ("Segmentation fault (core dumped)", "segfault"),
    ("Fatal Python error: Segmentation fault", "segfault"),
    ("python[4711]: segfault at 10 ip 00007f1c sp 00007ffd error 4 in libtorch_cpu.so[7f1c+1000]", "segfault"),
    ("  exitcode  : -11 (pid: 4711)", None),
    ("  traceback : Signal 11 (SIGSEGV) received by PID 4711", "segfault"),
    ("rank 3 on n1: killed by SIGSEGV (11)", "segfault"),
    ("torch.distributed.elastic.multiprocessing.api: [ERROR] failed (exitcode: -11) local_rank: 0 (pid: 4711) of binary: /usr/bin/python", "segfault"),
    ("torch.distributed.elastic.multiprocessing.api: [ERROR] failed (exitcode: -9) local_rank: 0 (pid: 4711) of binary: /usr/bin/python", "killed"),
    ("torch.distributed.elastic.multiprocessing.api: [ERROR] failed (exitcode: 1) local_rank: 0 (pid: 4711) of binary: /usr/bin/python", "launcher_failed"),
    ("run.sh: line 12: 4711 Killed                  python train.py", "killed"),
    ("subprocess.CalledProcessError: Command '['python']' died with <Signals.SIGKILL: 9>.", "killed"),
    ("[launch.py:321:main] Process 4711 exits with return code = -9", "killed"),
    ("[launch.py:321:main] Process 4711 exits with return code = -11", "segfault"),
    ("[1]    4711 segmentation fault (core dumped)  python train.py", "segfault"),
    ("double free or corruption (!prev)", "heap_corrupt"),
    ("Aborted (core dumped)", "aborted"),
    ("Illegal instruction (core dumped)", "illegal_instruction"),
    ("python: ../nptl/x.c:81: __f: Assertion `mutex->__data.__owner == 0' failed.", "c_assertion"),
    # storage
    ("OSError: [Errno 28] No space left on device", "disk_full"),
    ("OSError: [Errno 122] Disk quota exceeded", "disk_full"),
    ("RuntimeError: [enforce fail at inline_container.cc:603] . unexpected pos 1344 vs 1238", "write_failed"),
    ("OSError: [Errno 116] Stale file handle", "storage_gone"),
    ("blk_update_request: I/O error, dev nvme0n1, sector 12345", "io_error"),
    ("nvme nvme0: I/O 123 QID 4 timeout, aborting", "disk_timeout"),
    ("EXT4-fs error (device nvme0n1p2): ext4_find_entry:1455: inode #2: comm python: reading directory lblock 0", "fs_corrupt"),
    ("RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory", "checkpoint_unreadable"),
    ("OSError: [Errno 24] Too many open files", "too_many_files"),
    # schedulers
    ("slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2021-05-27T21:42:11 DUE TO TIME LIMIT ***", "slurm_time_limit"),
    ("slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2021-05-27T21:42:11 DUE TO PREEMPTION ***", "slurm_preempted"),
    ("srun: error: n1: task 3: Exited with exit code 1", "slurm_task_ended"),
    # code, data and configuration
    ("ModuleNotFoundError: No module named 'apex'", "module_missing"),
    ("ImportError: libcudart.so.11.0: cannot open shared object file: No such file or directory", "module_missing"),
    ("/usr/bin/python3: No module named torch.distributed.run", "module_not_run"),
    ("FileNotFoundError: [Errno 2] No such file or directory: '/data/train.bin'", "file_missing"),
    ("python: can't open file '/job/trian.py': [Errno 2] No such file or directory", "file_missing"),
    ("PermissionError: [Errno 13] Permission denied: '/ckpt/step.pt'", "permission_denied"),
    ("bash: ./run.sh: Permission denied", "permission_denied"),
    ("ZeroDivisionError: division by zero", "division_by_zero"),
    ("ZeroDivisionError: float division by zero", "division_by_zero"),
    ("Floating point exception (core dumped)", "float_exception"),
    ("AssertionError", "assertion"),
    ("AssertionError: batch must divide by 8", "assertion"),
    ("RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x100 and 128x10)", "shape_mismatch"),
    ("RuntimeError: Error(s) in loading state_dict for Net:", "state_mismatch"),
    ("RuntimeError: Trying to backward through the graph a second time", "runtime_error"),
    ("[rank0]: RuntimeError: something of our own", "runtime_error"),
    ("2026-01-01 12:00:00,123 - ERROR - RuntimeError: something of our own", "runtime_error"),
    ("KeyError: 'input_ids'", "python_exception"),
    ("omegaconf.errors.ConfigAttributeError: Key 'lr' is not in struct", "python_exception"),
    ('  File "train.py", line 3', None),
    ("SyntaxError: invalid syntax", "bad_syntax"),
    ("KeyboardInterrupt", "interrupted"),
    # what only repeats
    ("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ", "launcher_failed"),
    ("subprocess.CalledProcessError: Command '['python', 'train.py']' returned non-zero exit status 1.", "launcher_failed"),
    ("RuntimeError: Caught ValueError in DataLoader worker process 0.", "worker_repeats"),
]

HARMLESS = [
    "Killed",
    "Traceback (most recent call last):",
    "During handling of the above exception, another exception occurred:",
    '    raise RuntimeError("CUDA out of memory")',
    "[rank0]:     raise ValueError(f'bad {name}')",
    "    assert loss == loss, 'loss is finite'",
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.",
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
    "[rank0]: For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
    "Rerunning with num_workers=0 may give better error trace.",
    " iteration 9/ 10 | lm loss: 6.5E+00 | grad norm: 1.2 | number of skipped iterations:   3 | number of nan iterations:   0 |",
    "  check_for_nan_in_loss_and_grad .................. True",
    "loss: 2.31 info: nothing",
    "detect_anomaly=False nan_to_num=True",
    "n1:7:9 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>",
    "NCCL_ASYNC_ERROR_HANDLING is deprecated, use TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "n1:7:9 [0] NCCL INFO Setting affinity for GPU 0",
    "mean squared error: 0.12, error rate 3 %",
    "eval: word error rate 0.31, Error analysis written to /tmp/x",
    "0 errors, 0 failures",
    "UserWarning: The given NumPy array is not writable",
    "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid your system being overloaded",
    "torch.cuda.max_memory_allocated 12.1 GiB, memory limit 80 GiB",
    "catching OutOfMemoryError is on",
    "workers did not end in their grace, killing them local_ranks=[0] grace=5.0 signal=SIGKILL",
    "SIGTERM received, writing a checkpoint",
    "restored from checkpoint, segment 11 of 139",
    "loading data from /data/Errors/no such thing.txt",
    "expected 1000 samples, got 1000",
    "peer 10.0.0.2 connected",
    "all tensors moved to the same device",
    "n1:7:9 [0] NCCL INFO comm 0x7f rank 0 nranks 8 cudaDev 0 busId 3b000 - Init COMPLETE",
    "saving to the same location on the same volume",
    "loss/train: 2.3 nansum=0.1",
    "grad_norm: 0.7 nan_ratio: 0.0",
    "loss scale is 65536, gradient norm 0.3",
]


def line(text: str, *, at: float = 0.0, stream: Stream = Stream.ERR, rank: int | None = 0, **more: object) -> Line:
    return Line(at=at, stream=stream, text=text, node="n1", rank=rank, **more)  # type: ignore[arg-type]


def found(text: str) -> str | None:
    signature = TABLE.find(text)
    return signature.id if signature else None


@pytest.mark.parametrize(("text", "expected"), KNOWN, ids=lambda value: str(value)[:50])
def test_a_message_is_known_for_what_it_is(text: str, expected: str | None) -> None:
    assert found(text) == expected


@pytest.mark.parametrize("text", HARMLESS, ids=lambda value: value[:50])
def test_usual_lines_and_advice_are_no_sign_of_anything(text: str) -> None:
    assert found(text) is None


def test_what_only_the_kernel_may_say_is_not_believed_of_a_program() -> None:
    text = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus"
    assert TABLE.match(line(text, stream=Stream.KERNEL)).id == "xid_79"
    signature = TABLE.match(line("Out of memory: Killed process 4711 (python)", stream=Stream.OUT))
    assert signature is None
    assert not TABLE.match(line(text, stream=Stream.OUT)).id.startswith("xid_")


def test_an_event_is_known_by_the_innermost_exception_that_it_carries() -> None:
    told = (
        "Traceback (most recent call last):\n  File 'a.py', line 3, in f\n    return 1 / 0\nZeroDivisionError: division by zero\n\n"
        "The above exception was the direct cause of the following exception:\n\nTraceback (most recent call last):\nRuntimeError: no step\n"
    )
    event = line("failed step=3 RuntimeError: no step", stream=Stream.EVENT, event="failed", level="error", fields={"exception": told})
    assert TABLE.match(event).id == "division_by_zero"


def test_an_exception_that_an_event_tells_in_passing_is_no_failure() -> None:
    passing = line("retry why=x error=ValueError: bad", stream=Stream.EVENT, event="retry", level="info")
    assert TABLE.match(passing) is None
    assert TABLE.match(line("retry error=ValueError: bad", stream=Stream.EVENT, event="retry", level="error")).id == "python_exception"


LOGS = {
    "division_by_zero": ["Traceback (most recent call last):", '  File "t.py", line 3, in <module>', "    x = 1 / 0", "ZeroDivisionError: division by zero"],
    "python_exception": [  # the inner one, though what came of it is more specific
        "Traceback (most recent call last):",
        "KeyError: 'path'",
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        "Traceback (most recent call last):",
        "FileNotFoundError: [Errno 2] No such file or directory: 'None'",
    ],
    "runtime_error": [
        "RuntimeError: Caught RuntimeError in DataLoader worker process 1.",
        "Original Traceback (most recent call last):",
        "RuntimeError: no such sample",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "srun: error: n1: task 3: Exited with exit code 1",
    ],
    "cuda_ecc": [
        "[rank1]: ValueError: could not log",
        "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12) ran for 600123 milliseconds before timing out.",
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        "RuntimeError: CUDA error: out of memory",
    ],
    "killed": [
        "[rank1]: RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.3]:4711",
        "failed (exitcode: -9) local_rank: 0 (pid: 4711) of binary: /usr/bin/python",
    ],
    "peer_connection_lost": ["all well", "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.3]:4711"],
}


@pytest.mark.parametrize("expected", LOGS)
def test_a_log_comes_to_the_earliest_of_its_most_specific_roots(expected: str) -> None:
    assert TABLE.classify(LOGS[expected]).signature.id == expected


def test_a_log_of_usual_lines_comes_to_nothing() -> None:
    assert TABLE.classify(HARMLESS) is None


def test_a_cascade_is_what_a_log_comes_to_only_where_nothing_else_is_known() -> None:
    lines = LOGS["peer_connection_lost"]
    assert TABLE.classify(lines).signature.role is Role.CASCADE
    assert TABLE.classify([*lines, "RuntimeError: of our own"]).signature.id == "runtime_error"


# --- what is told --------------------------------------------------------------------------------------------------------


def test_a_finding_says_what_where_and_by_which_line() -> None:
    told = Signatures(TABLE).see(line("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", at=5.0, rank=3, generation=7))
    assert (told.kind, told.cls, told.role, told.certainty) == ("cuda_out_of_memory", Class.USER, Role.ROOT, Certainty.CERTAIN)
    assert (told.at, told.node, told.rank, told.generation, told.scope) == (5.0, "n1", 3, 7, "rank")
    assert told.line.startswith("torch.OutOfMemoryError")
    assert told.detector == "signature"


def test_the_same_of_one_rank_is_told_once_a_minute_and_counted() -> None:
    signatures = Signatures(TABLE)
    text = "KeyError: 'x'"
    assert signatures.see(line(text, at=0.0))
    assert [signatures.see(line(text, at=float(at))) for at in range(1, 60)] == [None] * 59
    assert signatures.see(line(text, at=30.0, rank=1)), "another rank is another matter"
    again = signatures.see(line(text, at=EVERY))
    assert again.features[0].value == 59.0


def test_an_outer_exception_of_a_chain_is_told_as_following_from_the_inner_one() -> None:
    signatures = Signatures(TABLE)
    assert signatures.see(line("KeyError: 'x'")).role is Role.ROOT
    assert signatures.see(line("The above exception was the direct cause of the following exception:")) is None
    assert signatures.see(line("ZeroDivisionError: division by zero", rank=1)).role is Role.ROOT, "another rank's own"
    assert signatures.see(line("RuntimeError: cannot go on")).role is Role.CASCADE
    assert signatures.see(line("ImportError: x")).role is Role.ROOT, "that chain is over"


def test_what_is_remembered_stays_bounded() -> None:
    signatures = Signatures(TABLE)
    for number in range(REMEMBERED_MAX + 100):
        signatures.see(line("KeyError: 'x'", rank=number))
        signatures.see(line("The above exception was the direct cause of the following exception:", rank=number + 10**6))
        TABLE.find("a" * (number % 997) + "b" * (number // 997))
    assert len(signatures._last) == len(signatures._chained) == REMEMBERED_MAX
    assert len(TABLE._seen) <= SEEN_MAX


# --- the table -----------------------------------------------------------------------------------------------------------


def test_every_signature_says_what_it_means_in_a_sentence_of_its_own() -> None:
    for signature in TABLE.signatures:
        assert len(signature.summary) > 15
        assert signature.summary[0].islower() or signature.summary.split()[0].isupper() or signature.summary[0] in "/DNR"
        assert (signature.role is Role.CASCADE) == (signature.cls is Class.CASCADE), signature.id
        assert (signature.role is Role.ADVISE) == (signature.cls is Class.ADVISE), signature.id
    assert TABLE.version >= 1


def test_what_is_specific_is_tried_before_what_is_generic() -> None:
    order = [signature.specificity for signature in TABLE.signatures]
    assert order == sorted(order, reverse=True)
    assert TABLE.signatures[-1].id == "python_exception"


def hostile(signature: Signature) -> list[str]:
    """Long lines that begin as the signature wants it and never end so."""
    cues = signature.cues
    words = re.findall(r"[A-Za-z]{3,}", signature.pattern.pattern if signature.pattern else "") or ["a"]
    return [
        *(cue * (2 * TEXT_MAX // len(cue)) for cue in cues),
        *(cue + tail * TEXT_MAX for cue in cues[:3] for tail in (" ", "a", "0", "[", "(", "a.", ": ", "nan ", ", ")),
        *((word + " ") * (TEXT_MAX // len(word)) + cues[0] for word in words[:6]),
        *(cues[0] + (word + ":") * (TEXT_MAX // len(word)) for word in words[:6]),
    ]


@pytest.mark.parametrize("signature", TABLE.signatures, ids=lambda signature: signature.id)
def test_no_line_makes_a_signature_slow(signature: Signature) -> None:
    worst = 0.0
    for text in hostile(signature):
        began = time.process_time()
        if signature.pattern:
            signature.pattern.search(text[:TEXT_MAX])
        worst = max(worst, time.process_time() - began)
    assert worst < 0.05


@given(st.text(max_size=3000))
@settings(max_examples=150, deadline=None)
def test_any_text_can_be_looked_at(text: str) -> None:
    began = time.process_time()
    TABLE.find(text)
    assert time.process_time() - began < 0.5


@given(st.lists(st.sampled_from([word for text, _ in KNOWN for word in text.split()]), max_size=40))
@settings(max_examples=150, deadline=None)
def test_a_line_means_the_same_whatever_came_before_it(words: list[str]) -> None:
    """What is remembered by a line without its digits must not change what a line with other digits means."""
    text = " ".join(words)
    fresh = Table(TABLE.signatures)
    TABLE.find(re.sub(r"\d", "7", text))
    assert TABLE.find(text) is fresh.find(text)


def test_digits_count_though_lines_are_remembered_without_them() -> None:
    assert found("bash: exited with code 137: exit code 137") == "killed"
    assert found("bash: exited with code 139: exit code 139") == "segfault"
    assert found("bash: exited with code 3: exit code 3") is None


# --- a site's own file ---------------------------------------------------------------------------------------------------


def site(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "site.toml"
    path.write_text(text)
    return path


def test_a_site_changes_takes_out_and_adds_signatures(tmp_path: Path) -> None:
    path = site(
        tmp_path,
        """
        [[signature]]
        id = "disk_full"
        class = "transient"
        [[signature]]
        id = "python_exception"
        disabled = true
        [[signature]]
        id = "site_license"
        cues = ["licence server"]
        class = "transient"
        summary = "the licence server of this site is away"
        [[xid]]
        number = 63
        class = "hardware"
        role = "root"
        """,
    )
    table = Table.load(path)
    assert table.find("OSError: [Errno 28] No space left on device").cls is Class.TRANSIENT
    assert table.find("KeyError: 'x'") is None
    assert table.find("no answer of the licence server at 10.0.0.1").id == "site_license"
    assert table.find("NVRM: Xid (PCI:0000:3b:00): 63, pid=1").role is Role.ROOT
    assert table.find("NVRM: Xid (PCI:0000:3b:00): 63, pid=1").summary == TABLE.find("NVRM: Xid (PCI:0000:3b:00): 63, pid=1").summary


def test_advice_is_no_sign_even_of_a_wide_signature_of_a_site(tmp_path: Path) -> None:
    table = Table.load(site(tmp_path, "[[signature]]\nid = 'any_cuda'\ncues = ['CUDA']\nclass = 'unknown'\nsummary = 'anything about CUDA'"))
    assert table.find("CUDA went wrong").id == "any_cuda"
    assert table.find("For debugging consider passing CUDA_LAUNCH_BLOCKING=1") is None
    assert table.find("[rank0]: CUDA kernel errors might be asynchronously reported at some other API call") is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[signature]]\nclass = 'user'", "no id"),
        ("[[signature]]\nid = 'x'\nclass = 'user'\nsummary = 'y'", "'cues' must be"),
        ("[[signature]]\nid = 'x'\nclass = 'user'\nsummary = 'y'\ncues = ['123']", "no digits"),
        ("[[signature]]\nid = 'x'\ncues = ['abc']\nclass = 'user'", "'summary' is missing"),
        ("[[signature]]\nid = 'x'\ncues = ['abc']\nclass = 'mine'\nsummary = 'y'", "it may be transient, hardware"),
        ("[[signature]]\nid = 'x'\ncues = ['abc']\nclass = 'user'\nsummary = 'y'\nregex = '('", "no regular expression"),
        ("[[signature]]\nid = 'x'\ncues = ['abc']\nclass = 'user'\nsummary = 'y'\nregex = '(a+)+b'", "without a bound"),
        ("[[signature]]\nid = 'x'\ncues = ['abc']\nclass = 'user'\nsummary = 'y'\nscope = 'rack'", "rank, node, job"),
        ("[[signature]]\nid = 'disk_full'\nclas = 'user'", "unknown key 'clas'"),
        ("[[signature]]\nid = 'disk_full'\nspecificity = 10", "0 to 9"),
        ("[[xid]]\nclass = 'user'", "no number"),
        ("[[signature", "site.toml"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(TableError, match=re.escape(said)):
        Table.load(site(tmp_path, text))


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"none\.toml"):
        Table.load(tmp_path / "none.toml")
