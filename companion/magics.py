"""``%%needs_gpu [count]``: a cell that runs only where there are enough GPUs."""
import ast


def _gpu_count():
    import torch
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def needs_gpu(line, cell):
    """Run the cell if the machine has ``line`` GPUs (default 1), else say what it needs."""
    text = line.strip() or "1"
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"%%needs_gpu takes a number of GPUs, got {line.strip()!r}")
    wanted, have = int(text), _gpu_count()
    if have < wanted:
        what = "a CUDA GPU" if wanted == 1 else f"{wanted} CUDA GPUs"
        print(f"This cell needs {what}; this machine has {have or 'none'}. "
              "The book's page shows what it printed on one that has.")
        return
    from IPython import get_ipython
    shell = get_ipython()
    source = shell.transform_cell(cell)
    # Not shell.run_cell: an error must reach the cell that holds the magic, once.
    exec(compile(ast.parse(source), "<needs_gpu>", "exec"), shell.user_ns)


def register(shell):
    shell.register_magic_function(needs_gpu, "cell")
