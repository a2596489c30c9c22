//! What a process has used, as Linux tells it.

use std::{fs, time::Duration};

use anyhow::{Context as _, Result};

/// `/proc` counts time in hundredths of a second, whatever the kernel's own clock.
const TICK: Duration = Duration::from_millis(10);

/// The time that a process and the kernel for it have computed so far.
pub fn cpu(pid: u32) -> Result<Duration> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The second field is the program's name in parentheses, and may hold anything.
    let fields = stat.rsplit(')').next().unwrap_or_default();
    let mut times = fields.split_whitespace().skip(11).map(str::parse);
    let mut next = || Ok::<u32, anyhow::Error>(times.next().context("too few fields")??);
    let (user, system) = (next()?, next()?);
    Ok(TICK * (user + system))
}

/// Resident memory, kB.
pub fn memory(pid: u32) -> Result<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let number = line.and_then(|line| line.split_whitespace().next());
    Ok(number.context("no VmRSS")?.parse()?)
}
