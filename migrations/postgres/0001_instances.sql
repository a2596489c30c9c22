-- What one sender instance wrote last. It lets a start tell its own work from that of Synapse's sender, and remembers
-- how far the instance has looked for servers that joined a room.
CREATE TABLE instances (
    instance_name text PRIMARY KEY,
    -- The position of type `events` that Burdock wrote to Synapse's federation_stream_position; NULL if it never did.
    event_cursor bigint,
    -- The position up to which current_state_delta_stream has been read; NULL if never.
    delta_cursor bigint,
    -- federation_sender_instances as the position was kept under, a name a line, in order: under another list destinations
    -- belong to others, and the position is no longer that of its destinations. NULL if never started.
    senders text
);
