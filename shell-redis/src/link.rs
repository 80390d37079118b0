//! One connection to the primary, and the scripts on it.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, ConnectionInfo, RedisError, Script, Value};

use crate::Options;
use crate::fault;
use crate::layout::{FORMAT, Layout, SHARD};

/// A connection that is not there by then, with all that is asked at its beginning, will not be.
const CONNECT: Duration = Duration::from_secs(2);
/// A reply that has not come by then is too late to be of use: no transaction is valid for so long.
const REPLY: Duration = Duration::from_secs(4);
/// The oldest release with what the scripts need: their flags, and log ids that count by themselves.
const OLDEST: (u32, u32) = (7, 0);

/// Which of the scripts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    Read,
    /// A commit that a server without memory refuses.
    Grow,
    /// A commit that it takes all the same.
    Keep,
}

/// The scripts with their hashes.
pub(crate) struct Scripts {
    read: Body,
    grow: Body,
    keep: Body,
    meta: Body,
}

struct Body {
    text: String,
    hash: String,
}

impl Body {
    fn new(flags: &str, parts: &[&str]) -> Body {
        let text = format!("#!lua{flags}\n{}", parts.concat());
        let hash = Script::new(&text).get_hash().to_owned();
        Body { text, hash }
    }
}

impl Scripts {
    pub fn new() -> Scripts {
        let (common, commit) = (include_str!("common.lua"), include_str!("commit.lua"));
        // Reads are flagged as if they wrote: a replica that would answer from the past refuses them.
        let oom = " flags=allow-oom";
        Scripts {
            read: Body::new(oom, &[common, include_str!("read.lua")]),
            grow: Body::new("", &[common, commit]),
            keep: Body::new(oom, &[common, commit]),
            meta: Body::new(oom, &[include_str!("meta.lua")]),
        }
    }

    fn body(&self, which: Which) -> &Body {
        match which {
            Which::Read => &self.read,
            Which::Grow => &self.grow,
            Which::Keep => &self.keep,
        }
    }
}

impl std::fmt::Debug for Scripts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Scripts")
    }
}

/// Why there is no connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConnectError {
    /// Not now.
    Unreachable(String),
    /// As things are configured, never.
    Refused(String),
}

impl std::fmt::Display for ConnectError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ConnectError::Unreachable(why) | ConnectError::Refused(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for ConnectError {}

/// What the server says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct About {
    /// `redis 7.0.15`.
    pub version: String,
    pub replica: bool,
    /// Missing if it would not say.
    pub eviction: Option<String>,
}

impl About {
    fn parse(info: &str) -> About {
        let field = |name: &str| {
            info.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':')).map(|v| v.trim().to_owned())
        };
        let version = match (field("valkey_version"), field("redis_version")) {
            (Some(version), _) => format!("valkey {version}"),
            (None, version) => format!("redis {}", version.unwrap_or_default()),
        };
        About { version, replica: field("role").is_some_and(|r| r != "master"), eviction: field("maxmemory_policy") }
    }

    fn too_old(&self) -> bool {
        let mut numbers = self.version.split([' ', '.']).skip(1).map_while(|n| n.parse::<u32>().ok());
        let version = numbers.next().zip(numbers.next());
        version.is_some_and(|v| v < OLDEST)
    }

    /// What is wrong with how it evicts.
    pub fn evicts(&self) -> Option<String> {
        let policy = self.eviction.as_deref().filter(|p| *p != "noeviction")?;
        Some(format!(
            "the server's maxmemory-policy is `{policy}`: at its limit it would throw jobs away; set noeviction"
        ))
    }
}

/// A connection that has been looked over.
#[derive(Clone, Debug)]
pub(crate) struct Link {
    connection: MultiplexedConnection,
    pub about: About,
    /// Which of the addresses it is.
    pub server: usize,
}

impl Link {
    /// To the first of the servers that is a primary and can be used.
    pub async fn connect(
        options: &Options,
        layout: &Layout,
        scripts: &Scripts,
        servers: &[ConnectionInfo],
    ) -> Result<Link, ConnectError> {
        let mut first = None;
        for (server, info) in servers.iter().enumerate() {
            let attempt = Link::open(options, layout, scripts, info.clone(), server);
            let error = match tokio::time::timeout(CONNECT, attempt).await {
                Ok(Ok(link)) => return Ok(link),
                Ok(Err(error)) => error,
                Err(_) => ConnectError::Unreachable(format!("{} does not answer", info.addr())),
            };
            // What an operator must mend is told rather than what may pass.
            if matches!((&first, &error), (None | Some(ConnectError::Unreachable(_)), ConnectError::Refused(_))) {
                first = Some(error);
            } else {
                first.get_or_insert(error);
            }
        }
        Err(first.unwrap_or_else(|| ConnectError::Refused("no server was named".into())))
    }

    async fn open(
        options: &Options,
        layout: &Layout,
        scripts: &Scripts,
        info: ConnectionInfo,
        server: usize,
    ) -> Result<Link, ConnectError> {
        let address = info.addr().to_string();
        let failed = |error: RedisError| {
            let why = format!("{address}: {error}");
            if fault::is_denied(&error) { ConnectError::Refused(why) } else { ConnectError::Unreachable(why) }
        };
        let client = Client::open(info).map_err(&failed)?;
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(CONNECT))
            .set_response_timeout(Some(options.reply_timeout.unwrap_or(REPLY)));
        let connection = client.get_multiplexed_async_connection_with_config(&config).await.map_err(&failed)?;
        let mut link = Link { connection, about: About::default(), server };
        link.look().await.map_err(&failed)?;
        let refused = |why: String| Err(ConnectError::Refused(format!("{address}: {why}")));
        if link.about.replica {
            return Err(ConnectError::Unreachable(format!("{address} is a replica")));
        }
        if link.about.too_old() {
            return refused(format!("{} is too old; 7.0 is the oldest that works", link.about.version));
        }
        if options.require_noeviction
            && let Some(why) = link.about.evicts()
        {
            return refused(why);
        }
        let meta = scripts.meta.hash.clone();
        let ask = |by: &str, script: &str| {
            let mut cmd = redis::cmd(by);
            cmd.arg(script).arg(1).arg(layout.meta()).arg(FORMAT).arg(SHARD);
            cmd
        };
        let mut found: Result<Vec<String>, _> = ask("EVALSHA", &meta).query_async(&mut link.connection).await;
        if found.as_ref().is_err_and(fault::is_noscript) {
            found = ask("EVAL", &scripts.meta.text).query_async(&mut link.connection).await;
        }
        check_namespace(options, &found.map_err(&failed)?).map_or_else(refused, |()| Ok(link))
    }

    /// Asks the server about itself.
    pub async fn look(&mut self) -> Result<(), RedisError> {
        let info: Result<String, _> = redis::cmd("INFO").query_async(&mut self.connection).await;
        match info {
            Ok(info) => self.about = About::parse(&info),
            // Who may not ask goes without.
            Err(error) if error.code() == Some("NOPERM") => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Deletes every key below the prefix.
    pub async fn clear(&mut self, layout: &Layout) -> Result<(), RedisError> {
        let all = [layout.prefix(), b"*"].concat();
        let mut cursor = 0u64;
        loop {
            let (next, keys): (u64, Vec<Vec<u8>>) = redis::cmd("SCAN")
                .arg(cursor)
                .arg("MATCH")
                .arg(&all)
                .arg("COUNT")
                .arg(1_000)
                .query_async(&mut self.connection)
                .await?;
            if !keys.is_empty() {
                let () = redis::cmd("UNLINK").arg(keys).query_async(&mut self.connection).await?;
            }
            cursor = next;
            if cursor == 0 {
                return Ok(());
            }
        }
    }

    /// Runs a script. If the server has forgotten it, its whole text goes along.
    pub async fn call(
        &mut self,
        scripts: &Scripts,
        which: Which,
        layout: &Layout,
        ask: &[u8],
        clock: &[u8],
        sender: &[u8],
    ) -> Result<Value, RedisError> {
        let body = scripts.body(which);
        let cmd = |by: &str, script: &str| {
            let mut cmd = redis::Cmd::with_capacity(7, ask.len() + 256);
            cmd.arg(by).arg(script).arg(1).arg(layout.prefix()).arg(ask).arg(clock).arg(sender);
            cmd
        };
        let reply = self.connection.send_packed_command(&cmd("EVALSHA", &body.hash)).await;
        match reply.and_then(Value::extract_error) {
            Err(error) if fault::is_noscript(&error) => {
                let reply = self.connection.send_packed_command(&cmd("EVAL", &body.text)).await;
                reply.and_then(Value::extract_error)
            }
            reply => reply,
        }
    }
}

/// Whether the namespace is one that this release may touch.
fn check_namespace(options: &Options, found: &[String]) -> Result<(), String> {
    let namespace = &options.namespace;
    match found {
        [_, format, shard] => match (format.parse::<u64>(), shard.parse::<u64>()) {
            (Ok(FORMAT), Ok(SHARD)) => Ok(()),
            (Ok(format), Ok(SHARD)) if format > FORMAT => Err(format!(
                "the namespace `{namespace}` is in format {format}, made by a newer release; this one knows {FORMAT}"
            )),
            (Ok(_), Ok(shard)) if shard != SHARD => {
                Err(format!("the namespace `{namespace}` has a shard {shard}; this release knows only {SHARD}"))
            }
            _ => Err(format!(
                "the namespace `{namespace}` is not Leasehold's: its record says format `{format}`, shard `{shard}`"
            )),
        },
        _ => Err(format!(
            "the namespace `{namespace}` is not Leasehold's: its record is a {}; name another namespace",
            found.first().map_or("?", String::as_str)
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_server_says_of_itself() {
        let about = About::parse("# Server\r\nredis_version:7.0.15\r\nrole:master\r\nmaxmemory_policy:allkeys-lru\r\n");
        assert_eq!(about.version, "redis 7.0.15");
        assert!(!about.replica && !about.too_old() && about.evicts().is_some());
        let about =
            About::parse("redis_version:7.2.4\r\nvalkey_version:9.1.2\r\nrole:slave\r\nmaxmemory_policy:noeviction");
        assert_eq!(about.version, "valkey 9.1.2");
        assert!(about.replica && !about.too_old() && about.evicts().is_none());
        assert!(About::parse("redis_version:6.2.14").too_old());
        assert!(!About::parse("").too_old());
    }
}
