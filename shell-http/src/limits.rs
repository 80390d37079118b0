//! What a connection, and all of them together, may ask of the server. Each has a default and a key
//! in the configuration, but for those that no operator has a reason to change.

use std::time::Duration;

use leasehold_core::limits::PAYLOAD_BYTES;

/// What follows a body that is too large is read and dropped up to here, so that the client gets to
/// read its answer.
pub const DROP: u64 = 64 * 1024 * 1024;
/// Within one `body_timeout` so much of a body must come, or its end.
pub const BODY_PROGRESS: usize = 16 * 1024;
/// Connections beyond `max_connections` that are taken to be told so, and to ask after the server's
/// health; what is beyond these waits in the system's queue.
pub const SPARE_CONNECTIONS: usize = 64;
/// A spare connection must have sent its call by then.
pub const SPARE_TIMEOUT: Duration = Duration::from_secs(5);
/// After its last answer a connection is read for so long, so that what a client has sent meanwhile
/// does not cost it the answer.
pub const LINGER: Duration = Duration::from_secs(1);
/// Files that are not connections: the store's, mostly.
pub const OTHER_FILES: u64 = 512;

/// The configurable ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of one body.
    pub max_body: u64,
    /// Bytes of all bodies that are being read or worked on.
    pub max_body_memory: u64,
    /// Connections served at once.
    pub max_connections: usize,
    /// Bytes of a call's line and headers together.
    pub max_head: u64,
    /// Bytes of a path and its query.
    pub max_uri: u64,
    /// From the first byte of a head to its last.
    pub head_timeout: Duration,
    /// For the next 16 KiB of a body, or its end.
    pub body_timeout: Duration,
    /// Between a call's answer and the next call's first byte.
    pub idle_timeout: Duration,
    /// For a client to take anything of an answer.
    pub write_timeout: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            max_body: 16 * 1024 * 1024,
            max_body_memory: 1024 * 1024 * 1024,
            max_connections: 10_000,
            max_head: 64 * 1024,
            max_uri: 8 * 1024,
            head_timeout: Duration::from_secs(10),
            body_timeout: Duration::from_secs(30),
            idle_timeout: Duration::from_secs(120),
            write_timeout: Duration::from_secs(30),
        }
    }
}

impl Limits {
    /// What is wrong with them, if anything.
    pub fn check(&self) -> Result<(), String> {
        let within = |fits: bool, what: &str| if fits { Ok(()) } else { Err(what.to_owned()) };
        within((1..=PAYLOAD_BYTES as u64).contains(&self.max_body), "`max_body` must be from 1 byte to 64MiB")?;
        within(
            (self.max_body..=1 << 40).contains(&self.max_body_memory),
            "`max_body_memory` must be from `max_body` to 1024GiB",
        )?;
        within((1..=1_000_000).contains(&self.max_connections), "`max_connections` must be from 1 to 1000000")?;
        within((8 << 10..=1 << 20).contains(&self.max_head), "`max_head` must be from 8KiB to 1MiB")?;
        within(
            (256..=self.max_head.min(65_534)).contains(&self.max_uri),
            "`max_uri` must be from 256 bytes to `max_head`, and below 64KiB",
        )?;
        for (key, time) in [
            ("head_timeout", self.head_timeout),
            ("body_timeout", self.body_timeout),
            ("idle_timeout", self.idle_timeout),
            ("write_timeout", self.write_timeout),
        ] {
            let fits = (Duration::from_millis(100)..=Duration::from_secs(24 * 3_600)).contains(&time);
            within(fits, &format!("`{key}` must be from 100ms to 24h"))?;
        }
        Ok(())
    }
}
