//! One process an instance name: a lock on a file beside the database.

use std::{
    fs::{File, OpenOptions, TryLockError},
    io::{Read, Write},
    path::PathBuf,
};

use super::Sqlite;
use crate::core::store::StoreError;

/// How much is read of a lock file's content, which says who holds it.
const MAX_CONTENT: u64 = 100;

/// The lock that says: this process is the instance. Dropping it releases the lock, as does any end of the process. The
/// file stays: one who removed it could take it from under another who has just opened it.
pub struct FileLock(File);

impl Sqlite {
    pub(in crate::core::store) fn lock_instance(&self) -> Result<FileLock, StoreError> {
        let path = self.lock_path();
        let failed = |error: std::io::Error| StoreError::Unavailable(format!("{}: {error}", path.display()));
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(failed)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                // Unreadable or not yet written: the lock is held all the same.
                let _ = file.take(MAX_CONTENT).read_to_string(&mut holder);
                return Err(StoreError::AlreadyRunning(holder.trim_end().to_owned()));
            }
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        file.set_len(0).map_err(failed)?;
        writeln!(file, "process {}", std::process::id()).map_err(failed)?;
        Ok(FileLock(file))
    }

    /// Beside the database, because the lock is about it; instance names are free text, and a file's name is not.
    fn lock_path(&self) -> PathBuf {
        let mut path = self.path.as_os_str().to_owned();
        path.push(".");
        for character in self.me.as_str().chars() {
            if character.is_ascii_alphanumeric() || character == '-' || character == '_' {
                path.push(character.to_string());
            } else {
                path.push(format!("%{:x}", u32::from(character)));
            }
        }
        path.push(".lock");
        path.into()
    }
}

impl FileLock {
    /// Holds the lock. It cannot be lost, so this never ends.
    pub(in crate::core::store) async fn watch(self) -> StoreError {
        let _held = self.0;
        std::future::pending().await
    }
}
