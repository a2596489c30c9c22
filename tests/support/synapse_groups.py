"""Has Synapse's own store write and read state groups.

Arguments: a homeserver's configuration. Standard input: `{"write": [...], "read": [...]}`. Each to be written is
{"room", "event", "previous" (an index in this list, or null), "delta": [[type, state key, event id], ...]}; each to be read is a
group's id. Standard output: `{"written": [ids], "read": {id: [[type, state key, event id], ...]}}`, where what was written
is read as well.
"""

import json
import sys

import yaml
from synapse.config.homeserver import HomeServerConfig
from synapse.server import HomeServer
from synapse.storage.databases.main import DataStore
from twisted.internet import defer, reactor


class Home(HomeServer):
    DATASTORE_CLASS = DataStore


async def answer(state, question):
    written, states = [], []
    for group in question["write"]:
        delta = {(kind, key): event for kind, key, event in group["delta"]}
        previous = group["previous"]
        whole = {**(states[previous] if previous is not None else {}), **delta}
        written.append(
            await state.store_state_group(
                group["event"],
                group["room"],
                prev_group=written[previous] if previous is not None else None,
                delta_ids=delta if previous is not None else None,
                current_state_ids=whole,
            )
        )
        states.append(whole)
    # What was written is in its cache; forgotten, it is read from the database.
    state._state_group_cache.invalidate_all()
    state._state_group_members_cache.invalidate_all()
    read = await state._get_state_for_groups(question["read"] + written)
    listed = {g: sorted([k, s, e] for (k, s), e in found.items()) for g, found in read.items()}
    return {"written": written, "read": listed}


async def main(state, question, done):
    try:
        done.append(await answer(state, question))
    finally:
        reactor.stop()


def start():
    with open(sys.argv[1], encoding="utf-8") as file:
        config = HomeServerConfig()
        config.parse_config_dict(yaml.safe_load(file), "", "")
    home = Home(hostname=config.server.server_name, config=config, reactor=reactor)
    home.setup()
    state = home.get_datastores().state
    question = json.load(sys.stdin)
    done = []

    def run():
        defer.ensureDeferred(home.run_as_background_process("groups", main, state, question, done))

    home.get_clock().call_when_running(run)
    reactor.run()
    json.dump(done[0], sys.stdout)


start()
