//! What a homeserver keeps beside events: rooms, users, and other servers' keys.

use super::Sqlite;
use crate::core::{
    clock::Millis,
    id::{RoomId, ServerName},
    store::StoreError,
};

/// A key of another server's, as it was fetched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteKey {
    /// With its algorithm: `ed25519:a`.
    pub key_id: String,
    /// The key's bytes.
    pub key: Vec<u8>,
    /// It may be trusted for events up to then.
    pub valid_until: Millis,
}

impl Sqlite {
    /// Makes a room. Returns false, and changes nothing, if it is there.
    ///
    /// # Errors
    /// Those of the database.
    pub async fn create_room(&self, room: &RoomId, version: &str, creator: &str) -> Result<bool, StoreError> {
        let mut tx = self.write().await?;
        let done = sqlx::query(
            "INSERT INTO rooms (room_id, creator, room_version) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING",
        )
        .bind(room.as_str())
        .bind(creator)
        .bind(version)
        .execute(&mut *tx)
        .await?;
        tx.commit().await?;
        Ok(done.rows_affected() > 0)
    }

    /// Makes a room that we are about to be in, in place of what we were told of it before.
    ///
    /// # Errors
    /// Those of the database.
    pub async fn replace_room(&self, room: &RoomId, version: &str, creator: &str) -> Result<(), StoreError> {
        let mut tx = self.write().await?;
        sqlx::query(
            "INSERT INTO rooms (room_id, creator, room_version) VALUES ($1, $2, $3)
             ON CONFLICT (room_id) DO UPDATE SET creator = EXCLUDED.creator, room_version = EXCLUDED.room_version",
        )
        .bind(room.as_str())
        .bind(creator)
        .bind(version)
        .execute(&mut *tx)
        .await?;
        Ok(tx.commit().await?)
    }

    /// The room's version; `None` if the room is unknown.
    ///
    /// # Errors
    /// Those of the database.
    pub async fn room_version(&self, room: &RoomId) -> Result<Option<String>, StoreError> {
        Ok(sqlx::query_scalar("SELECT room_version FROM rooms WHERE room_id = $1")
            .bind(room.as_str())
            .fetch_optional(&self.readers)
            .await?)
    }

    /// All rooms, in the order of their ids.
    ///
    /// # Errors
    /// Those of the database.
    pub async fn rooms(&self) -> Result<Vec<RoomId>, StoreError> {
        let rooms: Vec<String> = sqlx::query_scalar("SELECT room_id FROM rooms ORDER BY room_id")
            .fetch_all(&self.readers)
            .await?;
        Ok(rooms.into_iter().map(RoomId::from).collect())
    }

    /// Makes a user of ours. Returns false, and changes nothing, if there is one of that id.
    ///
    /// # Errors
    /// Those of the database.
    pub async fn create_user(&self, user: &str) -> Result<bool, StoreError> {
        let mut tx = self.write().await?;
        let done = sqlx::query("INSERT INTO users (name) VALUES ($1) ON CONFLICT DO NOTHING")
            .bind(user)
            .execute(&mut *tx)
            .await?;
        tx.commit().await?;
        Ok(done.rows_affected() > 0)
    }

    /// Whether there is a user of ours of that id.
    ///
    /// # Errors
    /// Those of the database.
    pub async fn user_exists(&self, user: &str) -> Result<bool, StoreError> {
        Ok(
            sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM users WHERE name = $1)")
                .bind(user)
                .fetch_one(&self.readers)
                .await?,
        )
    }

    /// Keeps keys of another server, in place of those of the same ids.
    ///
    /// # Errors
    /// Those of the database.
    pub async fn store_remote_keys(&self, server: &ServerName, keys: &[RemoteKey]) -> Result<(), StoreError> {
        let mut tx = self.write().await?;
        for key in keys {
            sqlx::query(
                "INSERT INTO server_signature_keys (server_name, key_id, verify_key, ts_valid_until_ms)
                 VALUES ($1, $2, $3, $4)
                 ON CONFLICT (server_name, key_id) DO UPDATE
                 SET verify_key = EXCLUDED.verify_key, ts_valid_until_ms = EXCLUDED.ts_valid_until_ms",
            )
            .bind(server.as_str())
            .bind(&key.key_id)
            .bind(&key.key)
            .bind(key.valid_until.0)
            .execute(&mut *tx)
            .await?;
        }
        Ok(tx.commit().await?)
    }

    /// The keys kept of another server, also those that are not valid any more: older events are signed with them.
    ///
    /// # Errors
    /// Those of the database.
    pub async fn remote_keys(&self, server: &ServerName) -> Result<Vec<RemoteKey>, StoreError> {
        let keys: Vec<(String, Vec<u8>, i64)> = sqlx::query_as(
            "SELECT key_id, verify_key, ts_valid_until_ms FROM server_signature_keys
             WHERE server_name = $1 ORDER BY key_id",
        )
        .bind(server.as_str())
        .fetch_all(&self.readers)
        .await?;
        Ok(keys
            .into_iter()
            .map(|(key_id, key, valid_until)| RemoteKey {
                key_id,
                key,
                valid_until: Millis(valid_until),
            })
            .collect())
    }
}
