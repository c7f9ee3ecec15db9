"""Worker processes named by TF_CONFIG, and the detection of lost ones.

Start every worker with the same command, and a TF_CONFIG with its own index:

    TF_CONFIG='{"cluster": {"worker": ["a:2222", "b:2222"]},
                "task": {"type": "worker", "index": 0}}'

The first is the chief: the job "chief", or else worker 0.
"""

from __future__ import annotations

import os
import socket

import tensorflow as tf

from tfdpsq import validation

TF_CONFIG = "TF_CONFIG"
# Longest wait for all workers, in seconds.
_WAIT_SECONDS = 600
# A worker without a sign of life for so many seconds is lost.
_LOST_SECONDS = 20


def opened() -> tf.distribute.Strategy:
    """Returns this worker's strategy once all workers are there.

    Raises:
      InputError: no usable TF_CONFIG, a port in use, or workers that did not come.
    """
    cluster, job, index = read_tf_config(os.environ.get(TF_CONFIG, ""))
    port = int(cluster[job][index].rsplit(":", 1)[1])
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise validation.InputError(
                f"TF_CONFIG gives this worker port {port}, which cannot be opened "
                f"({error.strerror}). Choose another, or stop the program that uses it."
            ) from error
    _watch_each_other(cluster)
    try:
        return tf.distribute.MultiWorkerMirroredStrategy()
    except (tf.errors.OpError, RuntimeError) as error:
        raise validation.InputError(
            f"the workers of TF_CONFIG ({_addresses(cluster)}) did not come together "
            f"within {_WAIT_SECONDS} seconds ({first_line(error)}). Start all of "
            "them, with the same command and each with its own index."
        ) from error


def read_tf_config(text: str) -> tuple[dict[str, list[str]], str, int]:
    """Checks the JSON text of a worker's TF_CONFIG.

    Returns:
      The addresses of each job, this process's job, and its index in it.

    Raises:
      InputError: it is missing or incomplete.
    """
    example = (
        'Set it to {"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": '
        '{"type": "worker", "index": 0}}, with each worker\'s own index.'
    )

    def bad(what: str) -> validation.InputError:
        return validation.InputError(f"TF_CONFIG {what}. {example}")

    if not text:
        raise bad("is not set")
    try:
        found = validation.parse_json(text)
        cluster, task = found["cluster"], found["task"]
        job, index = task["type"], int(task["index"])
        jobs = {str(name): list(at) for name, at in cluster.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise bad(
            f"is {text[:200]!r}, which is not a cluster and task ({error})"
        ) from None
    others = sorted(set(jobs) - {"chief", "worker"})
    if others:
        raise bad(f"has the jobs {others}; only chief and worker are allowed")
    if len(jobs.get("chief", [])) > 1:
        raise bad(f"has {len(jobs['chief'])} chiefs; there can be one at most")
    every = [address for name in sorted(jobs) for address in jobs[name]]
    for address in every:
        host, _, port = str(address).rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise bad(f"has the address {address!r}, which is not host:port")
    if len(set(every)) < len(every):
        raise bad(f"has an address twice ({', '.join(every)})")
    if job not in jobs or not 0 <= index < len(jobs[job]):
        raise bad(f"says that this is {job} {index}, which is not in {jobs}")
    return jobs, job, index


def _watch_each_other(cluster: dict[str, list[str]]) -> None:
    """Makes TensorFlow end all workers soon after one is lost."""
    from tensorflow.python.eager import context
    from tensorflow.tsl.protobuf import coordination_config_pb2

    first = "chief" if "chief" in cluster else "worker"
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=f"/job:{first}/replica:0/task:0",
        cluster_register_timeout_in_ms=_WAIT_SECONDS * 1000,
        heartbeat_timeout_in_ms=_LOST_SECONDS * 1000,
        coordinated_jobs=[
            coordination_config_pb2.CoordinatedJob(name=name, num_tasks=len(at))
            for name, at in sorted(cluster.items())
        ],
    )


def _addresses(cluster: dict[str, list[str]]) -> str:
    return ", ".join(address for name in sorted(cluster) for address in cluster[name])


def first_line(error: BaseException) -> str:
    """Returns the first line of an error message of pages."""
    return (str(error).strip().splitlines() or [""])[0][:300]
