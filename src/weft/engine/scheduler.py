"""The scheduler: admits and preempts sequences, picks the rows to decode and the next prompt chunk. Imports no mlx.

There are no phases: every sequence computes until `num_computed` reaches `num_tokens`. Rows that lack only their newest
token decode together; one prompt chunk at a time runs beside them.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field

from weft.config import EngineConfig
from weft.engine.bisect import Bisection
from weft.engine.budget import MemoryBudget
from weft.engine.fairness import Fairness
from weft.engine.mask_prices import MaskPrices
from weft.engine.sequence import Sequence
from weft.engine.step_shares import StepShares
from weft.ipc.messages import IMAGE_KEYS
from weft.memory.prefix_tree import MIN_SHARED, Node

UPCOMING_CHUNKS = 8  # slabs are sized for the rows whose prompts end within so many chunks
MAX_HELD_BACK = 3  # plans in a row whose decode step waits for short prompts
TAIL_TOKENS = 16  # a checkpoint is made one to two times as far before a prompt's end: similar prompts differ in their last words
SHORT_TAIL, MIN_WITH_TAIL = 8, 20  # tokens: the place of that checkpoint in a prompt too short for it; fewer have none
SHARED_CHUNK_TOKENS = 16  # of a chunk beside other tenants' tokens: a layer of 128 takes as long as a step of one row
MIN_SLICE = 0.1  # decode steps: a prompt always gets on beside other tenants' tokens
FIRST_STEP_SECONDS = 0.05  # a guess at the length of a decode step, until one was measured
MAX_SURPRISE = 3.0  # times what was expected of a step; one beside a prompt that took longer was disturbed

BestCut = Callable[[Sequence, int, list[Sequence]], int | None]
SharedTokens = tuple[Node, tuple[int, ...]]  # a prefix node, and the tokens of a chunk behind it


def tail_end(num_tokens: int) -> int:
    """Return where a prompt of `num_tokens` tokens has a checkpoint for prompts with other last words; 0: nowhere."""
    last = num_tokens - 1
    if last >= 2 * TAIL_TOKENS:
        return last // TAIL_TOKENS * TAIL_TOKENS - TAIL_TOKENS
    return SHORT_TAIL if num_tokens >= MIN_WITH_TAIL else 0


@dataclass(frozen=True)
class Row:
    """A prefill chunk of one sequence: its tokens in the half-open range [start, start + count)."""

    sequence: Sequence
    start: int
    count: int

    @property
    def has_images(self) -> bool:
        """Whether images may have to be encoded with it, which takes longer than its tokens."""
        return self.sequence.has_images_in(self.start, self.count)


@dataclass(frozen=True)
class Plan:
    """The scheduler's decision for one turn: sequences that decode, and a prompt chunk to work on."""

    steps: tuple[Sequence, ...]
    chunk: Row | None
    slice_seconds: float | None  # how long to work on the chunk; None: until it is done
    beside: tuple[Row, ...] = ()  # chunks of other prompts that are begun in one forward with the chunk
    upcoming: tuple[int, ...] = ()  # prompt lengths of the sequences that will join the steps next
    room: float | None = None  # how many times the time of one token per row the step may take; None: any
    step_tokens: int = 1  # of every row in the decode step, or at most of one, where rows may have fewer
    num_further: int = 0  # tokens that the step computes beside one of each row
    drafts: Mapping[Sequence, tuple[int, ...]] = field(default_factory=dict)  # tokens that the step verifies, by sequence


@dataclass(frozen=True)
class ChunkRules:
    """What a model allows of the chunks of prompts."""

    has_checkpoints: bool = False  # prompts go on only from where a chunk ended: one more ends near the prompt's end
    keeps_images_whole: bool = False  # no chunk ends amid an image
    groups_ragged: bool = False  # chunks of any lengths may be computed together, else only equally long ones
    cuts_freely: bool = False  # a chunk may end anywhere, without a bit that depends on it
    splits: bool = False  # what prompts have in common of a chunk they share, though they go on differently within it


class Scheduler:
    """Decides which sequences run: admission, preemption and each step's plan; owns the waiting, running and prefill queues."""

    def __init__(self, config: EngineConfig, budget: MemoryBudget, bisection: Bisection, rules: ChunkRules | None = None) -> None:
        self.config = config
        self.rules = rules or ChunkRules()
        self.budget = budget
        self.bisection = bisection
        self.fairness = Fairness()
        self.shares = StepShares(config.row_cost)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.prompts: list[Sequence] = []  # running, prompt not in memory yet
        self.following: list[Sequence] = []  # prompts that wait for the chunk planned last, which they need too
        self.apart: set[Sequence] = set()  # prompts that are not computed together with others any more: that failed
        self.step_seconds = FIRST_STEP_SECONDS  # of a step with nothing beside it, as reckoned
        self.busy_seconds = 0.0  # that a step takes longer beside a prompt
        self._quiet_rows, self._quiet_seconds = 0, 0.0  # of the last steps that had nothing beside them
        self.mask_prices: MaskPrices | None = None  # who sits out because its masks are slow; None: nobody does
        self._num_held_back = 0  # plans in a row whose steps were left out

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    @property
    def has_work(self) -> bool:
        """Whether any waiting or running sequence is unfinished or has a fork that still needs its prompt."""
        return any(not sequence.is_abandoned for queue in (self.waiting, self.running) for sequence in queue)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of waiting and running sequences that are not computed yet."""
        return sum(max(0, len(one.prefill_ids) - one.num_computed) for one in (*self.waiting, *self.prompts))

    def add(self, sequence: Sequence) -> None:
        self.fairness.arrive(sequence, (one for one in (*self.waiting, *self.running) if not one.is_abandoned))
        self.waiting.append(sequence)

    def admit(self, now: float) -> None:
        """Move waiting sequences to the running ones in fair order, as long as rows and memory are left."""
        while self.waiting and len(self.running) < self.config.max_rows:
            sequence = self._first(self.waiting)
            if not self.budget.fits(sequence, self.running):
                break  # no smaller one overtakes it, or it would starve
            self.waiting.remove(sequence)
            sequence.admit(now)
            self.running.append(sequence)
            if not sequence.is_prefilled:
                self.prompts.append(sequence)

    def to_preempt(self) -> Sequence | None:
        """Return the running sequence that must give up its row now, or None.

        The youngest when memory is over budget or a suspect waits for a row; the youngest of whoever has most rows, when
        somebody waits who was served less and has too few (`_overfed`).
        """
        running = [one for one in self.running if not one.is_finished]
        if len(running) > 1 and self.budget.is_over(running):
            return running[-1]
        if not self.waiting or not running:
            return None
        first = self._first(self.waiting)
        is_full = len(self.running) >= self.config.max_rows or not self.budget.fits(first, running)
        if is_full and self.bisection.is_suspect(first):  # the others do not step before it has
            return next((one for one in reversed(running) if not self.bisection.is_suspect(one)), None)
        overfed = self._overfed(first, running) if is_full else []
        return overfed[-1] if overfed else None

    def _overfed(self, first: Sequence, running: list[Sequence]) -> list[Sequence]:
        """Return the rows of which one is taken for a waiting sequence; [] if it has no right to any of them yet.

        Tenants have equally many rows if all want more. Within a tenant a client that has none gets one.
        """
        levels, rows = self.fairness.tenants, Counter(one.tenant for one in running)
        tenant, count = rows.most_common(1)[0]
        if rows[first.tenant] + 1 < count and levels.level(first.tenant) < levels.level(tenant):
            return [one for one in running if one.tenant == tenant]
        own, clients = [one for one in running if one.tenant == first.tenant], self.fairness.clients
        if not own or any(one.client == first.client for one in own):
            return []
        turn, count = Counter(one.turn for one in own).most_common(1)[0]
        is_owed = count > 1 and clients.level(first.turn) < clients.level(turn)
        return [one for one in own if one.turn == turn] if is_owed else []

    def preempt(self, sequence: Sequence) -> None:
        """Move a running sequence to the front of the waiting queue."""
        self.running = [one for one in self.running if one is not sequence]
        self.prompts = [one for one in self.prompts if one is not sequence]
        self.waiting.appendleft(sequence)

    def drop_finished(self) -> list[Sequence]:
        """Remove finished sequences from all queues and return those that ran; an unfinished fork replaces its leader."""
        gone = [sequence for sequence in self.running if sequence.is_finished]
        self.apart = {sequence for sequence in self.apart if not sequence.is_finished}
        leaders = [one for queue in (self.running, self.waiting) for one in queue if one.is_finished and not one.is_abandoned]
        successors = {id(leader): leader.hand_over_prompt() for leader in leaders}

        def alive(queue: Iterable[Sequence]) -> list[Sequence]:
            return [successors.get(id(one), one) for one in queue if id(one) in successors or not one.is_finished]

        self.running, self.prompts, self.waiting = alive(self.running), alive(self.prompts), deque(alive(self.waiting))
        return gone

    def drop_prefilled(self) -> list[Sequence]:
        done = [sequence for sequence in self.prompts if sequence.is_prefilled]
        self.prompts = [sequence for sequence in self.prompts if not sequence.is_prefilled]
        return done

    def release_forks(self, leader: Sequence) -> list[Sequence]:
        """Move the forks (further answers) of a computed prompt to the front of the waiting queue and return them."""
        forks = leader.release_forks()
        self.waiting.extendleft(reversed(forks))
        return forks

    def plan(self, best_cut: BestCut | None = None, *, may_hold_back: bool = True) -> Plan:
        """Choose rows to decode and the next prompt chunk; up to 3 plans in a row may skip decoding so a chunk goes first."""
        ready = tuple(one for one in self.running if one.is_prefilled and one.wants_token and self.bisection.may_step(one))
        flooding = self._flooding()
        chunk = self._next_chunk(best_cut, [one for one in ready if one.tenant not in flooding])
        steps = self.shares.choose(ready, self.running, flooding)
        if self.mask_prices is not None:
            steps = self.mask_prices.choose(steps)
        room = self.shares.room(steps, self.running, None, flooding)
        spare = None if chunk is None else self.shares.room(steps, self.running, chunk.sequence.tenant, flooding)
        is_short = chunk is not None and chunk.count <= self.config.unsliced_tokens and not chunk.has_images and spare is None
        is_first = chunk is not None and ((is_short and len(self.prompts) > 1) or self._is_owed(chunk.sequence, ready, flooding))
        if steps and is_first and may_hold_back and self._num_held_back < MAX_HELD_BACK:
            self._num_held_back += 1
            return Plan((), chunk, None, self._beside(chunk, ready, best_cut), self._upcoming())
        self._num_held_back = 0
        beside = self._beside(chunk, ready, best_cut)
        if chunk is not None and not steps and chunk.sequence.tenant in flooding and self.shares.costs.assumed:
            return Plan(steps, chunk, self._slice_seconds(None), beside, self._upcoming(), room)  # others may come meanwhile
        if chunk is None or is_short or not steps:
            return Plan(steps, chunk, None, beside, self._upcoming(), room)
        if spare is not None and room is not None:
            spare, room = (1 + spare) / 2, (1 + room) / 2  # the other half is for drafts, and for the slice
        return Plan(steps, chunk, self._slice_seconds(spare), beside, self._upcoming(), room)

    def _flooding(self) -> set[str]:
        """Return the tenants that have more sequences waiting than running."""
        running = Counter(one.tenant for one in self.running)
        return {tenant for tenant, count in Counter(one.tenant for one in self.waiting).items() if count > running[tenant]}

    def _is_owed(self, sequence: Sequence, ready: Collection[Sequence], flooding: Set[str]) -> bool:
        """Whether a prompt's tenant was served less than all whose rows would step, and all these flood."""
        level = self.fairness.tenants.level(sequence.tenant)
        others = {one.tenant for one in ready}
        return bool(others) and all(one in flooding and level < self.fairness.tenants.level(one) for one in others)

    def _slice_seconds(self, spare: float | None) -> float:
        """Return how long to work on a chunk beside a step that may take `spare` times its time; None: others do not mind.

        A step beside a slice and the slice have together the time of a quiet step and `gap_factor` times that.
        """
        longest = self.config.gap_factor if spare is None else max(MIN_SLICE, min(self.config.gap_factor, spare - 1))
        return max(MIN_SLICE * self.step_seconds, longest * self.step_seconds - self.busy_seconds)

    def chunk_ends(self, sequence: Sequence) -> Iterator[int]:
        """Iterate over the ends of a prompt's remaining chunks: multiples of the chunk size, boundaries, the last but one token.

        No chunk has one token, unless the prompt has no more: some models compute a single token differently (MLA).
        Where images are kept whole, an end amid one moves to its first token, or behind it if the chunk begins there.
        """
        return self._chunk_ends(sequence, tail_end(len(sequence.prefill_ids)) if self.rules.has_checkpoints else 0)

    def _chunk_ends(self, sequence: Sequence, tail: int = 0) -> Iterator[int]:
        size, last, end = self.config.chunk_tokens, len(sequence.prefill_ids) - 1, sequence.num_computed
        while end < last:
            places = [position for position in sequence.boundaries if position > end + 1][:1]
            if tail and tail >= end + min(tail, TAIL_TOKENS):
                places.append(tail)
            if sequence.prefix.chunk_limit > end + 1:
                places.append(sequence.prefix.chunk_limit)
            start, end = end, min(((end + 1) // size + 1) * size, *places, last)
            if end not in sequence.boundaries and end + 1 in sequence.boundaries:
                end += 1  # from `end` on it would be a chunk of one token, so the boundary would be passed over
            end = self._around_image(sequence.prefill_ids, start, end) if self.rules.keeps_images_whole else end
            end = last if end == last - 1 else end
            yield end

    @staticmethod
    def _around_image(ids: list[int], start: int, end: int) -> int:
        """Move a chunk's end out of an image: to the image's first token, or behind it if the chunk begins near there."""
        first = behind = end
        while first > start and ids[first - 1] >= IMAGE_KEYS and ids[first] >= IMAGE_KEYS:
            first -= 1
        if first > start + 1 or first == end:
            return first
        while ids[behind] >= IMAGE_KEYS:
            behind += 1
        return behind

    def finish_chunk(self, row: Row) -> None:
        """Charge a computed chunk to its client and move its prompt to the end of the prefill queue, or out of it if complete."""
        self.fairness.charge_chunk(row.sequence, row.start, row.count)
        self.prompts = [one for one in self.prompts if one is not row.sequence]
        if not row.sequence.is_prefilled:
            self.prompts.append(row.sequence)

    def measure_step(self, seconds: float, num_rows: int, num_tokens: int = 1) -> None:
        """Learn how long a step of so many rows and tokens per row took, with nothing beside it."""
        self.step_seconds += 0.2 * (seconds - self.step_seconds)
        if num_tokens == 1:
            self._quiet_seconds = seconds if num_rows != self._quiet_rows else 0.8 * self._quiet_seconds + 0.2 * seconds
            self._quiet_rows = num_rows
            self.shares.costs.measure(num_rows, seconds)

    def measure_busy_step(self, seconds: float, num_rows: int = 0) -> None:
        """Learn how long a step took beside which a prompt is computed: slices follow when many rows join at once.

        Nothing is computed while its host builds it, so it takes longer than a quiet one: by how much is learned where as many
        rows took a quiet step before.
        """
        seconds = min(seconds, MAX_SURPRISE * self.step_seconds)
        if num_rows and num_rows == self._quiet_rows:
            self.busy_seconds += 0.2 * (max(0.0, seconds - self._quiet_seconds) - self.busy_seconds)
        self.step_seconds += 0.2 * (max(seconds / MAX_SURPRISE, seconds - self.busy_seconds) - self.step_seconds)

    def twin(self, sequence: Sequence) -> Sequence | None:
        """Return another prompt that needs the chunk this sequence is computing and can take it over; None if there is none."""
        others = (one for one in self.prompts if not (one is sequence or one.is_finished or one.must_read_prompt))
        free = (one for one in others if not (one.prefix.is_loading or one.is_amid_chunk))
        return next((one for one in free if self._shares_chunk(one, sequence)), None)

    def _first(self, candidates: Collection[Sequence]) -> Sequence:
        """Return the candidate to run next: suspects of a failed step first, since all others wait for them, then the fairest."""
        return self.fairness.first([one for one in candidates if self.bisection.is_suspect(one)] or candidates)

    def _next_chunk(self, best_cut: BestCut | None, spared: Collection[Sequence]) -> Row | None:
        """Pick the next prefill chunk by fairness; of prompts that share it, prefer one with caches. None if none is ready.

        Beside tokens of other tenants that do not flood (`spared`) it is short: no slice is shorter than a layer of it.
        """
        ready = [one for one in self.prompts if not one.prefix.is_loading]
        if not ready:
            return None
        first = self._first(ready)
        first = self._with_caches(first, ready)
        if (position := self._find_cut(first, best_cut)) is not None:
            first.cut(position)  # where other prompts diverge, so that what they share is computed once
            first = self._with_caches(first, ready)  # another may have been cut there before
        others = (one for one in self.prompts if one is not first and not one.must_read_prompt)
        self.following = [one for one in others if self._shares_chunk(one, first)]
        if self.rules.cuts_freely and self.shares.is_shared(first, spared) and not first.is_amid_chunk:
            for one in (first, *self.following):
                one.limit_chunk(first.num_computed + SHARED_CHUNK_TOKENS)
        return Row(first, first.num_computed, next(self.chunk_ends(first)) - first.num_computed)

    def _with_caches(self, first: Sequence, ready: list[Sequence]) -> Sequence:
        """Return a prompt that needs the same chunk as `first` and has caches; `first` itself if it has some or nobody does."""
        if first.has_caches:
            return first
        return next((one for one in ready if one.has_caches and self._shares_chunk(one, first)), first)

    def _beside(self, chunk: Row | None, ready: Collection[Sequence], best_cut: BestCut | None) -> tuple[Row, ...]:
        """Return chunks of other prompts to compute in one forward with a chunk that begins, as many as there is room for.

        They are of the same tenant, and none of them has tokens in common with others to compute once. Unless the model takes
        chunks of any lengths, they are as long as the chunk.
        """
        if chunk is None or not self._can_group(chunk.sequence):
            return ()
        left, found, taken = self._group_room(chunk, ready) - chunk.count, [], {self._shared_tokens(chunk)}
        for other in self._by_what_is_left():
            if left < (1 if self.rules.groups_ragged else chunk.count):
                break
            row = Row(other, other.num_computed, next(self.chunk_ends(other)) - other.num_computed)
            if other is not chunk.sequence and row.count <= left and self._fits_group(row, chunk, taken, best_cut):
                found.append(row)
                taken.add(self._shared_tokens(row))
                left -= row.count
        return tuple(found)

    def _by_what_is_left(self) -> list[Sequence]:
        """Return the prompts in order, where chunks of any lengths share a forward those first of which a short rest is left."""
        if not self.rules.groups_ragged:
            return self.prompts
        return sorted(self.prompts, key=lambda one: len(one.prefill_ids) - 1 - one.num_computed > self.config.unsliced_tokens)

    def _group_room(self, chunk: Row, ready: Collection[Sequence]) -> int:
        """Return how many tokens a forward with a chunk may have.

        Beside rows that decode a short chunk is computed whole, and those with it; a longer one in slices, whose time is limited.
        """
        if not ready:
            return self.config.group_tokens
        if chunk.count <= self.config.unsliced_tokens:
            return min(self.config.group_tokens, self.config.group_tokens_short or self.config.unsliced_tokens)
        return min(self.config.group_tokens, self.config.group_tokens_beside or self.config.chunk_tokens)

    def _can_group(self, sequence: Sequence) -> bool:
        """Whether a prompt's next chunk may be computed together with others'."""
        is_plain = not (sequence.must_read_prompt or sequence.request.images)
        is_free = not (sequence.is_amid_chunk or sequence.prefix.is_loading or sequence in self.apart)
        return self.config.group_tokens > 0 and is_plain and is_free and not self.bisection.is_suspect(sequence)

    def _fits_group(self, row: Row, first: Row, taken: set[SharedTokens | None], best_cut: BestCut | None) -> bool:
        """Whether a chunk may join a group with this first one; `taken` are the tokens of all in it that others may share."""
        one = row.sequence
        if not self._can_group(one) or one.tenant != first.sequence.tenant:
            return False
        if not self.rules.groups_ragged and (row.count != first.count or (row.start == 0) != (first.start == 0)):
            return False
        shared = self._shared_tokens(row)
        if shared is not None and shared in taken:
            return False  # it goes on from there when that is computed
        return self._find_cut(one, best_cut) is None  # else what it shares with another prompt is computed first, by itself

    def _shared_tokens(self, row: Row) -> SharedTokens | None:
        """Return a chunk's prefix node and the tokens, all or the first, by which prompts share it; None if nobody may."""
        cursor = row.sequence.prefix
        if cursor.node is None or cursor.is_private:
            return None
        count = min(row.count, MIN_SHARED) if self.rules.splits else row.count
        return cursor.node, tuple(row.sequence.prefill_ids[row.start : row.start + count])

    def _find_cut(self, one: Sequence, best_cut: BestCut | None) -> int | None:
        """Return where to end a prompt's next chunk because other prompts diverge there; None for no such cut."""
        if best_cut is None or one.is_amid_chunk or one.num_computed == one.prefix.cut_at:  # once per place
            return None
        beside = [other for other in self.prompts if other is not one and other.prefix.node is one.prefix.node]
        return best_cut(one, next(self._chunk_ends(one)), beside)

    def _shares_chunk(self, one: Sequence, other: Sequence) -> bool:
        """Whether two prompts continue from one prefix node with the same next chunk (equal tokens and end)."""
        node = other.prefix.node
        if node is None or one.prefix.node is not node or one.prefix.is_private or other.prefix.is_private:
            return False
        start, end = other.num_computed, next(self.chunk_ends(other))
        return next(self.chunk_ends(one)) == end and one.prefill_ids[start:end] == other.prefill_ids[start:end]

    def _upcoming(self) -> tuple[int, ...]:
        """Return the lengths of prompts that will be computed within a few chunks, so that new slabs get slots for them."""
        lengths, work = [], 0
        for sequence in self.prompts:
            work += len(sequence.prefill_ids) - sequence.num_computed
            if work > UPCOMING_CHUNKS * self.config.chunk_tokens:
                break
            lengths.append(len(sequence.prefill_ids))
        return tuple(lengths)
