"""Runs llama.cpp's checkpoint converter. A separate program that children.py starts; no module imports it.

Torch and ggml have two OpenMP runtimes, so torch stays out of processes that load llama.cpp, and this file imports no
module of pyorch that loads it. It runs a list of jobs, and reports the bytes of the file that is written.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection

sys.path.pop(0)  # this file's directory, whose files are no top-level modules

from pyorch.processes import end_with

WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


class ProgressBar:
    """Replaces tqdm in the GGUF writer."""

    connection: Connection

    def __init__(self, *_args: object, desc: str = "", total: int | None = None, **_kwargs: object):
        self._shown = desc == "Writing"
        self._done = 0
        self._total = total or 0

    def update(self, n: int) -> None:
        self._done += n
        if self._shown:
            self.connection.send({"done": self._done, "total": self._total})

    def reset(self, total: int | None = None) -> None:
        self._done, self._total = 0, total or 0

    def set_description(self, *_args: object) -> None:
        pass

    def close(self) -> None:
        pass


class UnknownPreTokenizer(Exception):
    """The converter knows pre-tokenizers by a hash of their results, and not this one."""


def teach_pre_tokenizer(text_model: type) -> None:
    """Makes the converter use text_model.pre_tokenizer if it does not recognize the checkpoint's."""
    recognize = text_model.get_vocab_base_pre

    def get_vocab_base_pre(self, tokenizer) -> str:
        try:
            return recognize(self, tokenizer)
        except NotImplementedError:
            if self.pre_tokenizer is None:
                raise UnknownPreTokenizer from None
            return self.pre_tokenizer

    text_model.get_vocab_base_pre = get_vocab_base_pre


def read_tokenizers_of_transformers_5(transformers) -> None:
    """Makes transformers 4 read files of transformers 5.

    These have its class for any tokenizer.json, and a list of special tokens without names, formerly
    "additional_special_tokens", under the name of the former dictionary.
    """
    if hasattr(transformers, "TokenizersBackend"):
        return
    transformers.TokenizersBackend = transformers.PreTrainedTokenizerFast
    initialize = transformers.PreTrainedTokenizerBase.__init__

    def initialize_from_list(self, **options) -> None:
        if isinstance(options.get("extra_special_tokens"), list):
            extra = options.pop("extra_special_tokens")
            options.setdefault("additional_special_tokens", extra)
        initialize(self, **options)

    transformers.PreTrainedTokenizerBase.__init__ = initialize_from_list


def mark_files(gguf, key: str, value: str) -> None:
    """Adds a key of pyorch to each GGUF that is written from now on, by which pyorch recognizes replaceable files."""
    add_architecture = gguf.GGUFWriter.add_architecture

    def add_architecture_and_mark(self) -> None:
        add_architecture(self)
        self.add_string(key, value)

    gguf.GGUFWriter.add_architecture = add_architecture_and_mark


def may_have_mtp(converter, job: dict) -> bool:
    hparams = converter.ModelBase.load_hparams(converter.Path(job["checkpoint"]), False)
    name = converter.get_model_architecture(hparams, converter.ModelType.TEXT)
    return converter.get_model_class(name).supports_mtp_export


def convert(converter, job: dict) -> None:
    sys.argv = ["convert_hf_to_gguf.py", job["checkpoint"], "--outfile", job["output"], "--outtype", job["outtype"],
                *job["options"]]
    if not job["has_mtp"] and may_have_mtp(converter, job):
        sys.argv.append("--no-nextn")  # these classes require MTP layers, which training tools omit
    converter.main()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    connection = Connection(int(sys.argv[2]))
    end_with(connection.fileno())
    jobs = connection.recv()

    def fail(kind: str, message: str) -> None:
        connection.send({"error": kind, "message": message})

    # Imports and conversions read local files only.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    sys.path.insert(0, sys.argv[1])
    try:
        import conversion.base
        import convert_hf_to_gguf as converter
        import gguf
        import tqdm
        import transformers
    except ImportError as error:
        fail("missing", str(error))
        sys.exit(1)
    ProgressBar.connection = connection
    tqdm.tqdm = ProgressBar
    mark_files(gguf, *jobs["mark"])
    teach_pre_tokenizer(conversion.base.TextModel)
    read_tokenizers_of_transformers_5(transformers)
    for job in jobs["jobs"]:
        try:
            conversion.base.TextModel.pre_tokenizer = job["pre_tokenizer"]
            convert(converter, job)
        except UnknownPreTokenizer:
            fail("pre-tokenizer", "")
            sys.exit(1)
        except OSError as error:
            # numpy's message for a short write has no errno
            is_write = error.errno in WRITE_ERRORS or "requested and" in str(error)
            fail("write" if is_write else "failed", (is_write and error.strerror) or str(error))
            raise
        except SystemExit as error:
            if error.code:
                fail("failed", "")
                raise
        except Exception as error:
            # an assertion has no text, so its line stands for it
            text = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
            fail("failed", f"{type(error).__name__}: {text}")
            raise


if __name__ == "__main__":
    main()
