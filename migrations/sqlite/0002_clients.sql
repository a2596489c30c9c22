-- What the homeserver's clients need.

CREATE TABLE access_tokens (
    token text PRIMARY KEY,
    user_id text NOT NULL REFERENCES users,
    device_id text NOT NULL
) STRICT, WITHOUT ROWID;

-- What a client named a request, so that one that is repeated makes no second event. Metadata that is damaged names none.
CREATE UNIQUE INDEX event_json_txn_id
    ON event_json (iif(json_valid(internal_metadata), internal_metadata ->> '$.txn_id', NULL))
    WHERE iif(json_valid(internal_metadata), internal_metadata ->> '$.txn_id', NULL) IS NOT NULL;
