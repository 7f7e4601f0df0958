"""The command ``companion``: plans memory from a terminal.

    companion plan --model llama-2-7b --method full --gpu 24GiB
    companion plan --config path/to/config.json --method lora --batch 4 --gpu h100 --json

Options are the fields of ``companion.planner.Job``. A mistake is one line on stderr and exit
status 2.
"""
import argparse
import gc
import json
import sys
from dataclasses import MISSING, fields


class _Parser(argparse.ArgumentParser):
    """One line for a mistake, without the usage."""

    def error(self, message):
        raise ValueError(message)


def _number(text):
    value = float(text)
    return int(value) if value.is_integer() else value


def parser():
    from .planner import Job
    top = _Parser(prog="companion", description="Tools of the textbook Scaling and Efficiency.")
    commands = top.add_subparsers(dest="command", parser_class=_Parser, required=True)
    p = commands.add_parser("plan", help="will it fit on this GPU?",
                            description="Plan the memory of a training step or of inference.")
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help="a known name, or a count such as 7B")
    what.add_argument("--config", help="a Hugging Face config.json")
    what.add_argument("--list", action="store_true", help="the known models and GPUs")
    p.add_argument("--gpu", help="a name such as h100, or a size such as 24GiB")
    p.add_argument("--json", action="store_true", help="everything as JSON")
    for f in fields(Job):
        flag = "--" + f.name.replace("_", "-")
        if f.type is bool:
            p.add_argument(flag, action="store_true", help=f.metadata.get("help"))
        else:
            convert = {int: int, float: _number}.get(f.type, str)
            default = f.default if f.default is not MISSING else None
            p.add_argument(flag, type=convert, default=default, metavar=f.name.upper(),
                           help=f"default {default}")
    return top


def listing():
    from .hardware import GPUS
    from .planner_models import registry
    return "\n".join([f"{m.name:<34}{m.parameters:>18,}" for m in registry().values()]
                     + [""] + list(GPUS))


def run(arguments):
    """The text to print. Raises ValueError for a mistake."""
    from .planner import Job, find, find_device, make_plan
    o = parser().parse_args(arguments)
    if o.list:
        return listing()
    if o.config is not None:
        from .planner_models import from_config
        model = from_config(o.config)
    else:
        model = find(o.model)
    job = Job(**{f.name: getattr(o, f.name) for f in fields(Job)})
    result = make_plan(model, job, find_device(o.gpu))
    return json.dumps(result.as_dict(), indent=1) if o.json else str(result)


def main(arguments=None):
    """Print the answer; returns the exit status, 2 for a mistake."""
    gc.disable()  # a short process of many small objects without cycles
    try:
        print(run(sys.argv[1:] if arguments is None else arguments))
    except ValueError as error:
        print("companion: " + " ".join(str(error).split()), file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader went away, as in `companion plan ... | head`
        sys.stderr.close()
    finally:
        gc.enable()
    return 0


if __name__ == "__main__":
    sys.exit(main())
