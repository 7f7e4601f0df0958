"""What a reader is told of an answer that runs on real ranks."""
from companion import exercise, grading_ranks


# Catches a launcher's minute in place of seconds, and a message that does not say who waits where.
def test_an_answer_that_hangs_is_told_soon(monkeypatch, capsys):
    monkeypatch.setattr(grading_ranks, "SECONDS", 4)

    def hangs(parameters, count):
        import torch.distributed as dist
        if dist.get_rank() == 0:
            dist.recv(parameters[0].detach().clone(), 1)

    exercise.check("data_parallel-4", hangs)
    said = capsys.readouterr().out
    assert "no end within 4 s" in said and "rank 0 was at" in said and "rank 1 had finished" in said
