"""Upper bounds of the prefix-cache hit rate of a load, computed from its tokens: one request at a time, without a router.
They show how much of a measured hit rate is limited by the load and by the size of the caches."""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass

TRIES = 1000  # changes to a placement; each simulates the load


@dataclass
class Request:
    """A request as caches see it. Blocks are named by all tokens up to their end; partial ones are never found."""

    group: int  # requests of a group share a placement: the system prompt
    tokens: int  # of the prompt
    prompt: list  # names of the blocks that can be found; an engine always computes the last token
    kept: list  # names of the blocks cached afterwards: the prompt's and the answer's


def block_names(tokens, block_size):
    """Names of the full blocks of a prompt, equal where everything up to the block's end is equal."""
    names, before = [], 0
    for end in range(block_size, len(tokens) + 1, block_size):
        before = hash((before, *tokens[end - block_size : end]))
        names.append(before)
    return names


def make_requests(turns, block_size, max_tokens):
    """Requests of (group, conversation, prompt tokens) in their order. The blocks of an answer are taken from the
    conversation's next prompt, which repeats it; those of the last answer are not needed."""
    requests, last = [], {}
    for group, conversation, tokens in turns:
        names = block_names(tokens, block_size)
        if conversation in last:
            before = last[conversation]
            before.kept = names[: (before.tokens + max_tokens - 1) // block_size]
        last[conversation] = Request(group, len(tokens), names[: (len(tokens) - 1) // block_size], names)
        requests.append(last[conversation])
    return requests


def hit_rate(requests, places, block_size, blocks):
    """Share of the prompt tokens that are found if request i is served by worker places[i], each worker with a cache of
    so many blocks (None: without limit) that gives up the least recently used first, of one request its last."""
    caches = {place: OrderedDict() for place in places}
    found = 0
    for request, place in zip(requests, places):
        cache, hits = caches[place], 0
        while hits < len(request.prompt) and request.prompt[hits] in cache:
            hits += 1
        found += hits
        for name in reversed(request.kept):
            cache[name] = None
            cache.move_to_end(name)
        while blocks is not None and len(cache) >= blocks:  # one more for the partial block of the current request
            cache.popitem(last=False)
    return found * block_size / sum(r.tokens for r in requests)


def best_placement(requests, workers, block_size, blocks, seed):
    """The best hit rate found where each group has one worker, from random moves of one group or swaps of two. A better
    placement may exist; none is better than one cache without limit."""
    rng = random.Random(seed)
    groups = sorted({r.group for r in requests})
    place = {group: i % workers for i, group in enumerate(groups)}

    def rate(place):
        return hit_rate(requests, [place[r.group] for r in requests], block_size, blocks)

    best = rate(place)
    for _ in range(TRIES if workers > 1 else 0):
        one, other = rng.choice(groups), rng.choice(groups)
        changed = {**place, one: rng.randrange(workers)}
        if rng.random() < 0.5:
            changed.update({one: place[other], other: place[one]})
        if (now := rate(changed)) >= best:
            place, best = changed, now
    return best
