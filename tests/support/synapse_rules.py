"""Answers with Synapse's own code what the rules of a room version say.

One question a line, as JSON: the room's version and id, all its events (id -> JSON), and states to be resolved, each a list
of [type, state key, event id]. The answer is a line: the resolved state in the same form, and which events are not what
their id, hash or signature says.
"""

import json
import sys

import synapse.server  # First: the modules below would import each other in a circle.
from signedjson.key import decode_verify_key_bytes
from signedjson.sign import verify_signed_json
from synapse.api.room_versions import KNOWN_ROOM_VERSIONS
from synapse.crypto.event_signing import check_event_content_hash
from synapse.events import make_event_from_dict
from synapse.state.v2 import resolve_events_with_store
from synapse.storage.databases.main.event_federation import StateDifference
from synapse.synapse_rust.events import redact_event_dict
from unpaddedbase64 import decode_base64


class Events:
    """What resolution reads, from the question."""

    def __init__(self, events):
        self.events = events

    async def get_events(self, event_ids, allow_rejected=False):
        return {i: self.events[i] for i in event_ids if i in self.events}

    def chain(self, ids):
        found, todo = set(), list(ids)
        while todo:
            for auth in self.events[todo.pop()].auth_event_ids():
                if auth not in found:
                    found.add(auth)
                    todo.append(auth)
        return found

    async def get_auth_chain_difference(self, room_id, state_sets, conflicted, additional):
        chains = [self.chain(s) | set(s) for s in state_sets]
        difference = set.union(*chains) - set.intersection(*chains)
        if conflicted is None:
            return StateDifference(auth_difference=difference, conflicted_subgraph=None)
        ends = set(conflicted) | set(additional or ())
        reachable = ends | self.chain(ends)
        between = {i for i in reachable if i in ends or self.chain([i]) & ends}
        return StateDifference(auth_difference=difference, conflicted_subgraph=between)


def run(coroutine):
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise RuntimeError("it waits for something")


def is_sound(event, event_id, version, server, key):
    pruned = redact_event_dict(version, event.get_dict())
    for extra in ("age_ts", "unsigned"):
        pruned.pop(extra, None)
    try:
        verify_signed_json(pruned, server, key)
    except Exception:
        return False
    return event.event_id == event_id and check_event_content_hash(event)


for line in sys.stdin:
    question = json.loads(line)
    version = KNOWN_ROOM_VERSIONS[question["version"]]
    key = decode_verify_key_bytes(question["key_id"], decode_base64(question["key"]))
    events = {i: make_event_from_dict(e, version) for i, e in question["events"].items()}
    states = [{(kind, key): event for kind, key, event in state} for state in question["states"]]
    resolved = run(resolve_events_with_store(None, question["room_id"], version, states, None, Events(events)))
    answer = {
        "resolved": sorted([kind, key, event] for (kind, key), event in resolved.items()),
        "unsound": [i for i, e in events.items() if not is_sound(e, i, version, question["server"], key)],
    }
    print(json.dumps(answer), flush=True)
