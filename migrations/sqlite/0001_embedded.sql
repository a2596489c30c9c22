-- The embedded homeserver's database. Tables and columns have Synapse's names where they mean the same; what neither the
-- sender nor the master needs is left out. Times are in ms, flags are 0 or 1.

CREATE TABLE users (
    name text PRIMARY KEY -- a whole user id
) STRICT, WITHOUT ROWID;

CREATE TABLE erased_users (
    user_id text PRIMARY KEY
) STRICT, WITHOUT ROWID;

-- Other servers' keys as we fetched them.
CREATE TABLE server_signature_keys (
    server_name text NOT NULL,
    key_id text NOT NULL, -- with its algorithm: ed25519:a
    verify_key blob NOT NULL,
    ts_valid_until_ms integer NOT NULL,
    PRIMARY KEY (server_name, key_id)
) STRICT, WITHOUT ROWID;

CREATE TABLE rooms (
    room_id text PRIMARY KEY,
    creator text NOT NULL,
    room_version text NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE events (
    -- AUTOINCREMENT: a position is never given out again, not even if the newest events are deleted.
    stream_ordering integer PRIMARY KEY AUTOINCREMENT,
    event_id text NOT NULL UNIQUE,
    room_id text NOT NULL,
    type text NOT NULL,
    state_key text,
    sender text NOT NULL,
    depth integer NOT NULL,
    outlier integer NOT NULL,
    origin_server_ts integer,
    received_ts integer,
    instance_name text NOT NULL
) STRICT;
CREATE INDEX events_of_room ON events (room_id, stream_ordering);

CREATE TABLE event_json (
    event_id text PRIMARY KEY,
    room_id text NOT NULL,
    internal_metadata text NOT NULL,
    json text NOT NULL,
    format_version integer NOT NULL
) STRICT;

CREATE TABLE event_edges (
    event_id text NOT NULL,
    prev_event_id text NOT NULL,
    PRIMARY KEY (event_id, prev_event_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX event_edges_backwards ON event_edges (prev_event_id);

CREATE TABLE event_auth (
    event_id text NOT NULL,
    auth_id text NOT NULL,
    PRIMARY KEY (event_id, auth_id)
) STRICT, WITHOUT ROWID;

CREATE TABLE event_forward_extremities (
    event_id text NOT NULL,
    room_id text NOT NULL,
    PRIMARY KEY (room_id, event_id)
) STRICT, WITHOUT ROWID;

CREATE TABLE rejections (
    event_id text PRIMARY KEY,
    reason text NOT NULL,
    last_check text NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE redactions (
    event_id text PRIMARY KEY,
    redacts text NOT NULL,
    have_censored integer NOT NULL DEFAULT 0,
    received_ts integer,
    recheck integer NOT NULL DEFAULT 1
) STRICT, WITHOUT ROWID;
CREATE INDEX redactions_redacts ON redactions (redacts);

CREATE TABLE room_memberships (
    event_id text PRIMARY KEY,
    user_id text NOT NULL,
    sender text NOT NULL,
    room_id text NOT NULL,
    membership text NOT NULL,
    event_stream_ordering integer
) STRICT, WITHOUT ROWID;

CREATE TABLE current_state_events (
    event_id text NOT NULL UNIQUE,
    room_id text NOT NULL,
    type text NOT NULL,
    state_key text NOT NULL,
    membership text,
    event_stream_ordering integer,
    PRIMARY KEY (room_id, type, state_key)
) STRICT, WITHOUT ROWID;

CREATE TABLE current_state_delta_stream (
    stream_id integer NOT NULL,
    room_id text NOT NULL,
    type text NOT NULL,
    state_key text NOT NULL,
    event_id text,
    prev_event_id text,
    instance_name text
) STRICT;
CREATE INDEX current_state_delta_stream_position ON current_state_delta_stream (stream_id);

CREATE TABLE state_groups (
    id integer PRIMARY KEY,
    room_id text NOT NULL,
    event_id text NOT NULL
) STRICT;

-- No row: the group is stored in full.
CREATE TABLE state_group_edges (
    state_group integer PRIMARY KEY,
    prev_state_group integer NOT NULL
) STRICT;
CREATE INDEX state_group_edges_prev ON state_group_edges (prev_state_group);

CREATE TABLE state_groups_state (
    state_group integer NOT NULL,
    room_id text NOT NULL,
    type text NOT NULL,
    state_key text NOT NULL,
    event_id text NOT NULL,
    PRIMARY KEY (state_group, type, state_key)
) STRICT, WITHOUT ROWID;

CREATE TABLE event_to_state_groups (
    event_id text PRIMARY KEY,
    state_group integer NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX event_to_state_groups_group ON event_to_state_groups (state_group);

CREATE TABLE destinations (
    destination text PRIMARY KEY,
    retry_last_ts integer,
    retry_interval integer,
    failure_ts integer,
    last_successful_stream_ordering integer
) STRICT, WITHOUT ROWID;

CREATE TABLE destination_rooms (
    destination text NOT NULL REFERENCES destinations,
    room_id text NOT NULL REFERENCES rooms,
    stream_ordering integer NOT NULL,
    PRIMARY KEY (destination, room_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX destination_rooms_room ON destination_rooms (room_id);

CREATE TABLE sticky_events (
    -- AUTOINCREMENT: rows go when they expire, and a position of the backlog must not come to mean another event.
    stream_id integer PRIMARY KEY AUTOINCREMENT,
    instance_name text NOT NULL,
    event_id text NOT NULL,
    room_id text NOT NULL,
    event_stream_ordering integer NOT NULL UNIQUE,
    sender text NOT NULL,
    expires_at integer NOT NULL
) STRICT;
CREATE INDEX sticky_events_room ON sticky_events (room_id, stream_id);

CREATE TABLE destination_rooms_sticky_events_backlog (
    destination text NOT NULL,
    room_id text NOT NULL REFERENCES rooms ON DELETE CASCADE,
    sticky_events_stream_position integer NOT NULL,
    PRIMARY KEY (destination, room_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX destination_rooms_sticky_events_backlog_room ON destination_rooms_sticky_events_backlog (room_id);

CREATE TABLE federation_stream_position (
    type text NOT NULL,
    stream_id integer NOT NULL,
    instance_name text NOT NULL,
    PRIMARY KEY (type, instance_name)
) STRICT, WITHOUT ROWID;
INSERT INTO federation_stream_position VALUES ('events', 0, 'master'), ('federation', -1, 'master');

CREATE TABLE stream_positions (
    stream_name text NOT NULL,
    instance_name text NOT NULL,
    stream_id integer NOT NULL,
    PRIMARY KEY (stream_name, instance_name)
) STRICT, WITHOUT ROWID;

CREATE TABLE cache_invalidation_stream_by_instance (
    stream_id integer PRIMARY KEY AUTOINCREMENT,
    instance_name text NOT NULL,
    cache_func text NOT NULL,
    keys text, -- a JSON array
    invalidation_ts integer
) STRICT;

-- What one sender instance wrote last: as in migrations/postgres/0001_instances.sql.
CREATE TABLE instances (
    instance_name text PRIMARY KEY,
    event_cursor integer,
    delta_cursor integer,
    senders text
) STRICT, WITHOUT ROWID;
