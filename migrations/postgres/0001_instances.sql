-- What one sender instance wrote last. It lets a start tell its own work from that of Synapse's sender, and remembers
-- how far the instance has looked for servers that joined a room.
CREATE TABLE instances (
    instance_name text PRIMARY KEY,
    -- The position of type `events` that Burdock wrote to Synapse's federation_stream_position; NULL if it never did.
    event_cursor bigint,
    -- The position up to which current_state_delta_stream has been read; NULL if never.
    delta_cursor bigint,
    -- The instance's place in federation_sender_instances, from 0, when it last started: in another order destinations
    -- belong to others, and positions are no longer those of their destinations. NULL if it never started.
    place bigint
);
