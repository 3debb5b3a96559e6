"""Run llama.cpp's own HTTP server from its Python build: MODEL PORT SLOTS. Run with the Python of those tests."""

import signal
import sys

import xllamacpp


def main(model: str, port: str, slots: str) -> None:
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.model_alias = ["tiny"]
    params.hostnames = ["127.0.0.1"]
    params.port = int(port)
    params.n_ctx = 4096 * int(slots)
    params.n_parallel = int(slots)
    params.endpoint_metrics = True
    params.endpoint_slots = True
    params.warmup = False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
