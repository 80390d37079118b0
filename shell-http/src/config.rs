//! Configuration: a file, then the environment, then flags; the later one wins.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use leasehold_core::Config as Core;

use crate::limits::Limits;
use crate::record;
use crate::store::Address;
use crate::upstream::settings::Gateway;

/// Transactions in one commit to a Redis, which does nothing else meanwhile: at some 30 µs each it is
/// back after a few milliseconds.
const REDIS_COMMIT: usize = 200;

/// Flags of `leasehold serve`. Everything here can also stand in the file and in the environment.
#[derive(Args, Clone, Debug, Default)]
pub struct Flags {
    /// Address to listen on [default: 127.0.0.1:7411]
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<String>,
    /// Where jobs are kept: disk:FOLDER, or redis://[:PASSWORD@]HOST:PORT/DB which several servers may
    /// share, or mem: which keeps nothing [default: disk:./leasehold-data]
    #[arg(long, value_name = "STORE")]
    store: Option<String>,
    /// A TOML file
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// How long requests in work may take to finish when the server is told to end [default: 20s]
    #[arg(long, value_name = "TIME")]
    grace: Option<String>,
    /// Largest body that is taken [default: 16MiB]
    #[arg(long, value_name = "BYTES")]
    max_body: Option<String>,
    /// Connections served at once [default: 10000]
    #[arg(long, value_name = "NUMBER")]
    max_connections: Option<String>,
    /// Listen on an address that others can reach, although nobody has to say who they are
    #[arg(long)]
    insecure_listen: bool,
    /// error, warn, info, debug or trace [default: info]
    #[arg(long, value_name = "LEVEL")]
    log: Option<String>,
    /// How long ended jobs are kept, unless they say otherwise [default: 24h]
    #[arg(long, value_name = "TIME")]
    retention: Option<String>,
    /// How long a lease lasts, unless the queue, the job or the claim says otherwise [default: 30s]
    #[arg(long, value_name = "TIME")]
    lease: Option<String>,
    /// On a Redis: tells several systems on one server apart [default: lh]
    #[arg(long, value_name = "NAME")]
    redis_namespace: Option<String>,
    /// On a Redis: refuse a server whose eviction policy is not noeviction, rather than only say so
    #[arg(long)]
    require_noeviction: bool,
    /// Record what the server's core is told, without contents, into files in this folder: `sim replay` replays them
    #[arg(long, value_name = "FOLDER")]
    record: Option<String>,
    /// Bytes of all recordings in the folder: the oldest go first [default: 1GiB]
    #[arg(long, value_name = "BYTES")]
    record_limit: Option<String>,
}

/// The effective configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    pub listen: SocketAddr,
    pub store: Address,
    pub grace: Duration,
    pub insecure_listen: bool,
    pub log: tracing::level_filters::LevelFilter,
    pub retention: Duration,
    pub lease: Duration,
    /// What one connection, and all together, may ask of the server.
    pub limits: Limits,
    pub redis: leasehold_redis::Options,
    /// Where recordings are made.
    pub record: Option<PathBuf>,
    /// Bytes of all recordings in it.
    pub record_limit: u64,
    /// Pools, upstreams and routes: in the file only.
    pub gateway: Gateway,
}

impl Default for Config {
    fn default() -> Self {
        let core = Core::default();
        Config {
            listen: SocketAddr::from(([127, 0, 0, 1], 7411)),
            store: Address::Disk("./leasehold-data".into()),
            grace: Duration::from_secs(20),
            insecure_listen: false,
            log: tracing::level_filters::LevelFilter::INFO,
            retention: Duration::from_millis(core.retention_ms),
            lease: Duration::from_millis(core.lease_ms),
            limits: Limits::default(),
            redis: leasehold_redis::Options::default(),
            record: None,
            record_limit: 1 << 30,
            gateway: Gateway::default(),
        }
    }
}

/// Every key of the file; in the environment `LEASEHOLD_` and the key in capitals.
pub const KEYS: &[&str] = &[
    "listen",
    "store",
    "grace",
    "max_body",
    "insecure_listen",
    "log",
    "retention",
    "lease",
    "max_connections",
    "max_body_memory",
    "max_head",
    "max_uri",
    "head_timeout",
    "body_timeout",
    "idle_timeout",
    "write_timeout",
    "redis_namespace",
    "require_noeviction",
    "record",
    "record_limit",
];

/// Variables that begin like ours and mean something else: the clients', and what a worker's
/// command is given.
const OTHERS: &[&str] = &[
    "LEASEHOLD_CONFIG",
    "LEASEHOLD_SERVER",
    "LEASEHOLD_JOB_ID",
    "LEASEHOLD_ATTEMPT",
    "LEASEHOLD_DELIVERY",
    "LEASEHOLD_TOKEN",
    "LEASEHOLD_QUEUE",
    "LEASEHOLD_CONTENT_TYPE",
];

/// Set by Kubernetes for every service that is named `leasehold…`.
fn is_service_link(name: &str) -> bool {
    let Some(rest) = name.strip_prefix("LEASEHOLD") else { return false };
    rest == "_PORT" || rest.contains("_SERVICE_HOST") || rest.contains("_SERVICE_PORT") || rest.contains("_PORT_")
}

/// Where a value came from and what is wrong with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadConfig(pub String);

impl std::fmt::Display for BadConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for BadConfig {}

impl Config {
    /// Reads file, environment and flags.
    pub fn load(flags: &Flags, env: impl IntoIterator<Item = (String, String)>) -> Result<Config, BadConfig> {
        let env: Vec<(String, String)> = env.into_iter().collect();
        let mut config = Config::default();
        let named = env.iter().find(|(k, _)| k == "LEASEHOLD_CONFIG").map(|(_, v)| PathBuf::from(v));
        if let Some(path) = flags.config.clone().or(named) {
            config.file(&path, &env)?;
        }
        for (name, value) in env.iter().filter(|(k, _)| k.starts_with("LEASEHOLD_")) {
            if OTHERS.contains(&name.as_str()) || is_service_link(name) {
                continue;
            }
            let key = name.trim_start_matches("LEASEHOLD_").to_ascii_lowercase();
            config.set(&key, value).map_err(|why| BadConfig(format!("environment variable {name}: {why}")))?;
        }
        config.flags(flags)?;
        config.check()?;
        Ok(config)
    }

    /// `env`: where the file may say that a secret is.
    fn file(&mut self, path: &Path, env: &[(String, String)]) -> Result<(), BadConfig> {
        let bad = |why: String| BadConfig(format!("{}: {why}", path.display()));
        let bytes = std::fs::read(path).map_err(|e| bad(e.to_string()))?;
        let text = std::str::from_utf8(&bytes)
            .map_err(|e| bad(format!("{}: this is not UTF-8", place(&bytes, e.valid_up_to()))))?;
        let table: toml::Table = text.parse().map_err(|e| bad(not_toml(&bytes, &e)))?;
        for (key, value) in &table {
            if Gateway::has(key) {
                self.gateway.set(key, value, env).map_err(bad)?;
                continue;
            }
            let text = match value {
                toml::Value::String(text) => text.clone(),
                toml::Value::Integer(n) => n.to_string(),
                toml::Value::Boolean(b) => b.to_string(),
                _ if KEYS.contains(&key.as_str()) => {
                    return Err(bad(format!("`{key}` must be a string, a number or true or false")));
                }
                _ => return Err(bad(unknown(key))),
            };
            self.set(key, &text).map_err(bad)?;
        }
        self.gateway.check().map_err(bad)
    }

    fn flags(&mut self, flags: &Flags) -> Result<(), BadConfig> {
        let given = [
            ("listen", &flags.listen),
            ("store", &flags.store),
            ("grace", &flags.grace),
            ("max_body", &flags.max_body),
            ("max_connections", &flags.max_connections),
            ("log", &flags.log),
            ("retention", &flags.retention),
            ("lease", &flags.lease),
            ("redis_namespace", &flags.redis_namespace),
            ("record", &flags.record),
            ("record_limit", &flags.record_limit),
        ];
        for (key, value) in given {
            if let Some(value) = value {
                let flag = key.replace('_', "-");
                self.set(key, value).map_err(|why| BadConfig(format!("--{flag}: {why}")))?;
            }
        }
        self.insecure_listen |= flags.insecure_listen;
        self.redis.require_noeviction |= flags.require_noeviction;
        Ok(())
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        match key {
            "listen" => {
                self.listen = value
                    .parse()
                    .map_err(|_| format!("`listen` must be an address and a port, as 127.0.0.1:7411, not `{value}`"))?;
            }
            "store" => self.store = value.parse()?,
            "grace" => self.grace = time(key, value)?,
            "max_body" => self.limits.max_body = bytes(key, value)?,
            "max_connections" => self.limits.max_connections = count(key, value)?,
            "max_body_memory" => self.limits.max_body_memory = bytes(key, value)?,
            "max_head" => self.limits.max_head = bytes(key, value)?,
            "max_uri" => self.limits.max_uri = bytes(key, value)?,
            "head_timeout" => self.limits.head_timeout = time(key, value)?,
            "body_timeout" => self.limits.body_timeout = time(key, value)?,
            "idle_timeout" => self.limits.idle_timeout = time(key, value)?,
            "write_timeout" => self.limits.write_timeout = time(key, value)?,
            "insecure_listen" => {
                self.insecure_listen =
                    value.parse().map_err(|_| format!("`insecure_listen` must be true or false, not `{value}`"))?;
            }
            "record" => self.record = Some(value).filter(|folder| !folder.is_empty()).map(PathBuf::from),
            "record_limit" => self.record_limit = bytes(key, value)?,
            "log" => {
                self.log = value
                    .parse()
                    .map_err(|_| format!("`log` must be error, warn, info, debug, trace or off, not `{value}`"))?;
            }
            "retention" => self.retention = time(key, value)?,
            "lease" => self.lease = time(key, value)?,
            "redis_namespace" => {
                self.redis.namespace = value.into();
                self.redis.check()?;
            }
            "require_noeviction" => {
                self.redis.require_noeviction =
                    value.parse().map_err(|_| format!("`require_noeviction` must be true or false, not `{value}`"))?;
            }
            _ => return Err(unknown(key)),
        }
        Ok(())
    }

    fn check(&self) -> Result<(), BadConfig> {
        use leasehold_core::limits;
        let bad = |why: String| Err(BadConfig(why));
        if !self.listen.ip().is_loopback() && !self.insecure_listen {
            return bad(format!(
                "{} can be reached from other machines, and nobody has to say who they are. Listen on 127.0.0.1, or \
                 give --insecure-listen if that is what you want.",
                self.listen
            ));
        }
        let lease = millis(self.lease);
        if !(limits::LEASE_MS_MIN..=limits::LEASE_MS_MAX).contains(&lease) {
            return bad("`lease` must be from 100ms to 24h".into());
        }
        if millis(self.retention) > limits::DURATION_MS_MAX {
            return bad("`retention` must be at most 400 days".into());
        }
        self.limits.check().map_err(BadConfig)
    }

    /// Whether and where what the replica is told is recorded.
    pub fn record(&self) -> Option<record::Settings> {
        let folder = self.record.clone()?;
        Some(record::Settings { folder, limit: self.record_limit })
    }

    /// The core's part.
    pub fn core(&self) -> Core {
        let mut core = Core {
            retention_ms: millis(self.retention),
            lease_ms: millis(self.lease),
            routing: self.gateway.routing(),
            fail_open: self.gateway.fail_open(),
            ..Core::default()
        };
        if matches!(self.store, Address::Redis(_)) {
            core.commit_txns = core.commit_txns.min(REDIS_COMMIT);
        }
        core
    }

    /// As a file that would configure the same.
    pub fn to_toml(&self) -> String {
        let mut table = toml::Table::new();
        let log = self.log.to_string();
        for (key, value) in [
            ("listen", self.listen.to_string()),
            ("store", self.store.to_string()),
            ("grace", format!("{}ms", millis(self.grace))),
            ("log", log),
            ("retention", format!("{}ms", millis(self.retention))),
            ("lease", format!("{}ms", millis(self.lease))),
            ("redis_namespace", self.redis.namespace.clone()),
            ("record", self.record.as_deref().map(|folder| folder.display().to_string()).unwrap_or_default()),
        ] {
            table.insert(key.into(), value.into());
        }
        let limits = &self.limits;
        for (key, value) in [
            ("max_body", limits.max_body),
            ("max_connections", limits.max_connections as u64),
            ("max_body_memory", limits.max_body_memory),
            ("max_head", limits.max_head),
            ("max_uri", limits.max_uri),
            ("record_limit", self.record_limit),
        ] {
            table.insert(key.into(), i64::try_from(value).unwrap_or(i64::MAX).into());
        }
        for (key, value) in [
            ("head_timeout", limits.head_timeout),
            ("body_timeout", limits.body_timeout),
            ("idle_timeout", limits.idle_timeout),
            ("write_timeout", limits.write_timeout),
        ] {
            table.insert(key.into(), format!("{}ms", millis(value)).into());
        }
        table.insert("insecure_listen".into(), self.insecure_listen.into());
        table.insert("require_noeviction".into(), self.redis.require_noeviction.into());
        self.gateway.to_toml(&mut table);
        table.to_string()
    }
}

/// A place in a file as people count: lines and characters from 1 on.
fn place(file: &[u8], at: usize) -> String {
    let before = String::from_utf8_lossy(file.get(..at).unwrap_or(file));
    let last = before.rsplit('\n').next().unwrap_or_default();
    format!("line {}, column {}", before.matches('\n').count() + 1, last.chars().count() + 1)
}

/// On one line, and without what stands in the file there: that may be a secret.
fn not_toml(file: &[u8], error: &toml::de::Error) -> String {
    let message = error.message().replace('\n', "; ");
    match error.span() {
        Some(span) => format!("{}: this is not TOML: {message}", place(file, span.start)),
        None => format!("this is not TOML: {message}"),
    }
}

fn unknown(key: &str) -> String {
    let (tables, list) = (Gateway::TABLES.join("]], [["), Gateway::ON_PREM_TENANTS);
    format!("there is no key `{}`; there are: {}, {list}, and [[{tables}]]", key.escape_debug(), KEYS.join(", "))
}

pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// A number and a unit.
pub(crate) fn time(key: &str, text: &str) -> Result<Duration, String> {
    let bad = || format!("`{key}` must be a time as 500ms, 20s, 5m, 24h or 7d, not `{text}`");
    let split = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(bad)?;
    let (number, unit) = text.split_at(split);
    let number: u64 = number.parse().map_err(|_| bad())?;
    let unit_ms = match unit.trim() {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err(bad()),
    };
    Ok(Duration::from_millis(number.checked_mul(unit_ms).ok_or_else(bad)?))
}

fn count(key: &str, text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| format!("`{key}` must be a whole number, not `{text}`"))
}

fn bytes(key: &str, text: &str) -> Result<u64, String> {
    let bad = || format!("`{key}` must be a number of bytes, or as 64KiB or 16MiB, not `{text}`");
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let number: u64 = number.parse().map_err(|_| bad())?;
    let factor: u64 = match unit.trim() {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => return Err(bad()),
    };
    number.checked_mul(factor).ok_or_else(bad)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    }

    fn with_file(text: &str, pairs: &[(&str, &str)], flags: Flags) -> Result<Config, String> {
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let n = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("leasehold-config-{}-{n}.toml", std::process::id()));
        std::fs::write(&path, text).unwrap();
        let loaded = Config::load(&Flags { config: Some(path.clone()), ..flags }, env(pairs));
        std::fs::remove_file(path).unwrap();
        loaded.map_err(|e| e.0)
    }

    #[test]
    fn the_later_wins() {
        let file = "listen = \"127.0.0.1:1\"\ngrace = \"1s\"\nmax_body = 100\nlog = \"warn\"";
        let flags = Flags { grace: Some("3s".into()), ..Flags::default() };
        let config = with_file(file, &[("LEASEHOLD_LISTEN", "127.0.0.1:2"), ("LEASEHOLD_GRACE", "2s")], flags).unwrap();
        assert_eq!(config.listen.port(), 2);
        assert_eq!(config.grace, Duration::from_secs(3));
        assert_eq!(config.limits.max_body, 100);
        assert_eq!(with_file(&config.to_toml(), &[], Flags::default()), Ok(config), "what is printed can be read");
        let pool = "[[pools]]\nname = \"gpu\"\ntotal = 8";
        let config = with_file(pool, &[], Flags::default()).unwrap();
        assert_eq!(config.gateway.pools.len(), 1);
        assert_eq!(with_file(&config.to_toml(), &[], Flags::default()), Ok(config));
    }

    #[test]
    fn complaints_name_what_is_wrong() {
        for (file, word) in [
            ("colour = 1", "colour"),
            ("[[pools]]\nname = \"x\"", "pools.x.total"),
            ("[[upstreams]]\nname = \"x\"", "upstreams.x.url"),
            ("grace = 20", "grace"),
            ("grace = []", "grace"),
            ("max_body = \"1TB\"", "max_body"),
            ("store = \"redis\"", "redis"),
            ("listen = \"localhost\"", "listen"),
            ("listen = \"0.0.0.0:7411\"", "--insecure-listen"),
            ("lease = \"1ms\"", "lease"),
            ("max_body = 0", "max_body"),
            ("max_body_memory = 1", "max_body_memory"),
            ("max_connections = 0", "max_connections"),
            ("max_connections = \"many\"", "max_connections"),
            ("max_head = \"1KiB\"", "max_head"),
            ("max_uri = \"1MiB\"", "max_uri"),
            ("head_timeout = \"0s\"", "head_timeout"),
            ("body_timeout = \"2d\"", "body_timeout"),
            ("x", "line 1, column 2: this is not TOML"),
            ("grace = \"5s\"\nx = \"\u{e9}\u{e9}", "line 2, column 8: this is not TOML: invalid basic string"),
            ("\u{e9} = 1", "line 1, column 1: this is not TOML"),
            ("a = 1\r\nb = \u{1}", "line 2, column 5: this is not TOML"),
        ] {
            let why = with_file(file, &[], Flags::default()).unwrap_err();
            assert!(why.contains(word), "{file}: {why}");
        }
        // A message may go to a log: what stands in the file is not quoted.
        let why = with_file("store = \"redis://:hunter2@a", &[], Flags::default()).unwrap_err();
        assert!(why.contains("line 1") && !why.contains("hunter2") && !why.contains('\n'), "{why}");
        let why = with_file("", &[("LEASEHOLD_COLOUR", "x")], Flags::default()).unwrap_err();
        assert!(why.contains("LEASEHOLD_COLOUR"), "{why}");
    }

    #[test]
    fn every_key_is_printed() {
        let printed: toml::Table = Config::default().to_toml().parse().unwrap();
        let mut keys: Vec<&str> = printed.keys().map(String::as_str).collect();
        let mut known = KEYS.to_vec();
        keys.sort_unstable();
        known.sort_unstable();
        assert_eq!(keys, known);
        assert_eq!(with_file(&Config::default().to_toml(), &[], Flags::default()), Ok(Config::default()));
    }

    #[test]
    fn what_others_set_is_left_alone() {
        let others = [
            ("LEASEHOLD_SERVER", "x"),
            ("LEASEHOLD_PORT", "tcp://10.0.0.1:7411"),
            ("LEASEHOLD_SERVICE_HOST", "10.0.0.1"),
            ("LEASEHOLD_PORT_7411_TCP_ADDR", "10.0.0.1"),
            ("PATH", "/bin"),
        ];
        assert_eq!(with_file("", &others, Flags::default()), Ok(Config::default()));
        assert!(with_file("insecure_listen = true\nlisten = \"[::]:7411\"", &[], Flags::default()).is_ok());
    }
}
