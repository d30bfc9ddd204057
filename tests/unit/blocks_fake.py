"""An engine for decoding in blocks: steps, and what its model runner is given in each."""
import gc
import types


class Engine:
    """An engine whose `rows` requests are all decoding after a few steps, and after `most` steps not any more; nor in
    the steps of `short`."""

    def __init__(self, rows=3, most=10**9, joins=2, short=()):
        self.runner = types.SimpleNamespace(execute_model=lambda output: self.seen.append(gc.isenabled()))
        self.rows, self.most, self.joins, self.taken, self.seen, self.aborted = rows, most, joins, 0, [], None
        self.short = short

    def has_unfinished_requests(self):
        return True

    def step(self):
        self.taken += 1
        count = self.rows if self.joins < self.taken <= self.most and self.taken not in self.short else 1
        self.runner.execute_model(types.SimpleNamespace(num_scheduled_tokens=dict.fromkeys(range(count), 1),
                                                        total_num_scheduled_tokens=count))

    def abort_request(self, names):
        self.aborted = names
