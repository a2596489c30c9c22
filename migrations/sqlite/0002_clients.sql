-- What the homeserver's clients need.

CREATE TABLE access_tokens (
    token text PRIMARY KEY,
    user_id text NOT NULL REFERENCES users,
    device_id text NOT NULL
) STRICT, WITHOUT ROWID;

-- What a client named a request, so that one that is repeated makes no second event.
CREATE UNIQUE INDEX event_json_txn_id ON event_json (internal_metadata ->> '$.txn_id')
    WHERE internal_metadata ->> '$.txn_id' IS NOT NULL;
