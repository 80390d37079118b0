//! `[[pools]]`, `[[upstreams]]` and `[[routes]]` of the configuration file.
//!
//! Every complaint names the entry and its key. The value of a header can be a secret: it is read from the
//! environment or from a file, and is neither logged nor printed.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use hyper::header::{HeaderName, HeaderValue};
use leasehold_core::dispatch::{self, Routing};
use leasehold_core::limits;
use leasehold_core::pool::open::FailOpen;
use toml::{Table, Value};

use crate::config::{millis, time};
use crate::wire::submit::TENANT;

/// Headers that HTTP itself or the server sets.
const NOT_CONFIGURABLE: &[&str] = &[
    "host",
    "connection",
    "content-length",
    "transfer-encoding",
    "content-type",
    "te",
    "trailer",
    "upgrade",
    "expect",
];

/// What the server calls, and how much of it at once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gateway {
    pub pools: Vec<Pool>,
    pub upstreams: Vec<Upstream>,
    pub routes: Vec<Route>,
    /// All work of these stays on the premises.
    pub on_prem_tenants: Vec<String>,
}

/// A pool as it is set when the server starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    pub name: String,
    pub total: u64,
    /// `None`: the total.
    pub batch_max: Option<u64>,
    pub lease_ms: u64,
    /// So many are admitted by this server itself while the store cannot be reached; `None`: nobody is.
    pub fail_open: Option<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upstream {
    pub name: String,
    pub base: Base,
    /// Where jobs are sent, below the base.
    pub path: String,
    pub models: Vec<String>,
    pub pool: String,
    pub on_prem: bool,
    pub headers: Vec<Header>,
    pub connect_timeout: Duration,
    /// From the request to the head of the answer.
    pub first_byte_timeout: Duration,
    /// Of the whole call.
    pub timeout: Duration,
    pub health: Option<Health>,
    /// Roots to trust instead of the system's.
    pub tls_ca: Option<PathBuf>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Health {
    pub path: String,
    pub every: Duration,
}

/// Jobs of a queue that the server runs itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    pub queue: String,
    pub tenants: Vec<String>,
    /// By name.
    pub upstreams: Vec<String>,
}

/// `http://HOST:PORT/PREFIX`, taken apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Base {
    pub tls: bool,
    /// A name or an address; of IPv6 without brackets.
    pub host: String,
    pub port: u16,
    /// As it stands in the Host header.
    pub authority: String,
    /// Without a slash at its end.
    pub prefix: String,
}

impl std::str::FromStr for Base {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = "must be http://HOST[:PORT][/PATH] or https://…, without a user, a query or a fragment";
        let uri: hyper::Uri = text.parse().map_err(|_| bad)?;
        let tls = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(bad),
        };
        let authority = uri.authority().filter(|a| !a.as_str().contains('@') && !a.host().is_empty()).ok_or(bad)?;
        if uri.query().is_some() || text.contains('#') {
            return Err(bad);
        }
        Ok(Base {
            tls,
            host: authority.host().trim_matches(['[', ']']).to_owned(),
            port: authority.port_u16().unwrap_or(if tls { 443 } else { 80 }),
            authority: authority.as_str().to_owned(),
            prefix: uri.path().trim_end_matches('/').to_owned(),
        })
    }
}

impl fmt::Display for Base {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}{}", if self.tls { "https" } else { "http" }, self.authority, self.prefix)
    }
}

/// A header that is sent with every call to an upstream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    pub name: HeaderName,
    /// Marked as sensitive: its `Debug` does not show it.
    pub value: HeaderValue,
    origin: Origin,
}

/// Printed in place of a value that stands in the file.
const NOT_SHOWN: &str = "(not shown)";

/// Where a header's value came from.
#[derive(Clone, PartialEq, Eq)]
enum Origin {
    /// Text of the file, which is not shown either: it could be a secret all the same.
    Here,
    Env {
        name: String,
        prefix: String,
    },
    File {
        path: String,
        prefix: String,
    },
}

impl fmt::Debug for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Origin")
    }
}

impl Header {
    fn of(entry: &Entry<'_>, name: &str, value: &Value, env: &[(String, String)]) -> Result<Header, String> {
        let key = format!("headers.{name}");
        let bad = |what: &str| entry.bad(&key, what);
        let parsed: HeaderName = name.parse().map_err(|_| bad("is not the name of a header"))?;
        if NOT_CONFIGURABLE.contains(&parsed.as_str()) || parsed.as_str().starts_with("leasehold-") {
            return Err(bad("is set by the server itself"));
        }
        let (origin, text) = match value {
            Value::String(text) => (Origin::Here, text.clone()),
            Value::Table(table) => {
                let inner = Entry { at: format!("{}.{key}", entry.at), table };
                inner.known(&["env", "file", "prefix"])?;
                let prefix = inner.text("prefix")?.unwrap_or_default();
                match (inner.text("env")?, inner.text("file")?) {
                    (Some(name), None) => {
                        let value = env.iter().find(|(k, _)| *k == name).map(|(_, v)| v.clone());
                        let value = value.ok_or_else(|| bad(&format!("the environment has no variable {name}")))?;
                        (Origin::Env { name, prefix: prefix.clone() }, prefix + &value)
                    }
                    (None, Some(path)) => {
                        let value = std::fs::read_to_string(&path).map_err(|e| bad(&format!("{path}: {e}")))?;
                        let text = format!("{prefix}{}", value.trim_end_matches(['\r', '\n']));
                        (Origin::File { path, prefix }, text)
                    }
                    _ => return Err(bad("needs either `env` or `file`")),
                }
            }
            _ => return Err(bad("must be a string, or { env = \"NAME\" }, or { file = \"PATH\" }")),
        };
        if text == NOT_SHOWN {
            return Err(bad("is what is printed in place of a value: give the value, or where it is to be found"));
        }
        // The text may be a secret: the complaint does not show it.
        let mut value = HeaderValue::from_str(&text).map_err(|_| bad("has a value that cannot stand in a header"))?;
        value.set_sensitive(true);
        Ok(Header { name: parsed, value, origin })
    }

    fn to_toml(&self) -> Value {
        let source = |key: &str, value: &str, prefix: &str| {
            let mut table = Table::new();
            table.insert(key.into(), value.into());
            if !prefix.is_empty() {
                table.insert("prefix".into(), prefix.into());
            }
            Value::Table(table)
        };
        match &self.origin {
            Origin::Here => NOT_SHOWN.into(),
            Origin::Env { name, prefix } => source("env", name, prefix),
            Origin::File { path, prefix } => source("file", path, prefix),
        }
    }
}

impl Gateway {
    /// The keys of the file that are tables of these.
    pub const TABLES: &[&str] = &["pools", "upstreams", "routes"];
    /// The one that is a list of names.
    pub const ON_PREM_TENANTS: &str = "on_prem_tenants";

    pub fn has(key: &str) -> bool {
        key == Gateway::ON_PREM_TENANTS || Gateway::TABLES.contains(&key)
    }

    /// Takes one of them.
    pub fn set(&mut self, key: &str, value: &Value, env: &[(String, String)]) -> Result<(), String> {
        if key == Gateway::ON_PREM_TENANTS {
            let table = Table::from_iter([(key.to_owned(), value.clone())]);
            let tenants = Entry { at: "the file".into(), table: &table }.names(key)?.unwrap_or_default();
            if tenants.iter().any(|tenant| tenant != TENANT) {
                return Err(format!("`{key}`: there is one tenant without tokens, `{TENANT}`"));
            }
            self.on_prem_tenants = tenants;
            return Ok(());
        }
        let entries = entries(key, value)?;
        match key {
            "pools" => self.pools = entries.iter().map(Pool::of).collect::<Result<_, _>>()?,
            "upstreams" => self.upstreams = entries.iter().map(|e| Upstream::of(e, env)).collect::<Result<_, _>>()?,
            _ => self.routes = entries.iter().map(Route::of).collect::<Result<_, _>>()?,
        }
        Ok(())
    }

    /// That what is named is there, and nothing is there twice.
    pub fn check(&self) -> Result<(), String> {
        once("pools", self.pools.iter().map(|p| &p.name))?;
        once("upstreams", self.upstreams.iter().map(|u| &u.name))?;
        once("routes", self.routes.iter().map(|r| &r.queue))?;
        for upstream in &self.upstreams {
            if !self.pools.iter().any(|p| p.name == upstream.pool) {
                return Err(format!("`upstreams.{}.pool`: there is no pool `{}`", upstream.name, upstream.pool));
            }
        }
        for route in &self.routes {
            let unknown = route.upstreams.iter().find(|name| !self.upstreams.iter().any(|u| u.name == **name));
            if let Some(name) = unknown {
                return Err(format!("`routes.{}.upstreams`: there is no upstream `{name}`", route.queue));
            }
        }
        Ok(())
    }

    /// What the core must know of it.
    pub fn routing(&self) -> Routing {
        let upstream =
            |u: &Upstream| dispatch::Upstream { name: u.name.clone(), pool: Some(u.pool.clone()), on_prem: u.on_prem };
        let route = |r: &Route| dispatch::Route {
            queue: r.queue.clone(),
            tenants: r.tenants.clone(),
            upstreams: r.upstreams.clone(),
        };
        Routing {
            upstreams: self.upstreams.iter().map(upstream).collect(),
            routes: self.routes.iter().map(route).collect(),
            on_prem_tenants: self.on_prem_tenants.clone(),
        }
    }

    /// Pools to which the core admits some by itself while the store cannot be reached.
    pub fn fail_open(&self) -> BTreeMap<String, FailOpen> {
        let open = self.pools.iter().filter_map(|pool| Some((pool, pool.fail_open?)));
        open.map(|(pool, local)| (pool.name.clone(), FailOpen { local, lease_ms: pool.lease_ms })).collect()
    }

    pub fn to_toml(&self, into: &mut Table) {
        if !self.on_prem_tenants.is_empty() {
            into.insert(Gateway::ON_PREM_TENANTS.into(), texts(&self.on_prem_tenants));
        }
        let mut list = |key: &str, tables: Vec<Table>| {
            if !tables.is_empty() {
                into.insert(key.into(), Value::Array(tables.into_iter().map(Value::Table).collect()));
            }
        };
        list("pools", self.pools.iter().map(Pool::to_toml).collect());
        list("upstreams", self.upstreams.iter().map(Upstream::to_toml).collect());
        list("routes", self.routes.iter().map(Route::to_toml).collect());
    }
}

impl Pool {
    const KEYS: &[&str] = &["name", "total", "batch_max", "lease_ms", "fail_open", "fail_open_local"];

    fn of(entry: &Entry<'_>) -> Result<Pool, String> {
        entry.known(Pool::KEYS)?;
        let total =
            entry.number("total", 1, limits::POOL_TOTAL_MAX)?.ok_or_else(|| entry.bad("total", "is missing"))?;
        let open = entry.flag("fail_open")? == Some(true);
        let local = entry.number("fail_open_local", 1, total)?;
        if local.is_some() && !open {
            return Err(entry.bad("fail_open_local", "means nothing unless `fail_open` is true"));
        }
        let local = u32::try_from(local.unwrap_or_else(|| total.div_ceil(2))).unwrap_or(u32::MAX);
        Ok(Pool {
            name: entry.name("name")?,
            total,
            batch_max: entry.number("batch_max", 0, total)?,
            lease_ms: entry.number("lease_ms", limits::LEASE_MS_MIN, limits::LEASE_MS_MAX)?.unwrap_or(limits::LEASE_MS),
            fail_open: open.then_some(local),
        })
    }

    fn to_toml(&self) -> Table {
        let mut table = Table::new();
        table.insert("name".into(), self.name.clone().into());
        table.insert("total".into(), number(self.total));
        if let Some(most) = self.batch_max {
            table.insert("batch_max".into(), number(most));
        }
        table.insert("lease_ms".into(), number(self.lease_ms));
        table.insert("fail_open".into(), self.fail_open.is_some().into());
        if let Some(local) = self.fail_open {
            table.insert("fail_open_local".into(), number(local.into()));
        }
        table
    }
}

impl Upstream {
    const KEYS: &[&str] = &[
        "name",
        "url",
        "path",
        "models",
        "pool",
        "on_prem",
        "headers",
        "connect_timeout",
        "first_byte_timeout",
        "timeout",
        "health",
        "health_every",
        "tls_ca",
    ];

    fn of(entry: &Entry<'_>, env: &[(String, String)]) -> Result<Upstream, String> {
        entry.known(Upstream::KEYS)?;
        let url = entry.text("url")?.ok_or_else(|| entry.bad("url", "is missing"))?;
        let base: Base = url.parse().map_err(|why| entry.bad("url", why))?;
        let every = entry.time("health_every", 10_000)?;
        let tls_ca = entry.text("tls_ca")?.map(PathBuf::from);
        if tls_ca.is_some() && !base.tls {
            return Err(entry.bad("tls_ca", "is for https only"));
        }
        let headers = match entry.table.get("headers") {
            None => Vec::new(),
            Some(Value::Table(table)) => {
                table.iter().map(|(name, value)| Header::of(entry, name, value, env)).collect::<Result<_, _>>()?
            }
            Some(_) => return Err(entry.bad("headers", "must be a table of headers")),
        };
        Ok(Upstream {
            name: entry.name("name")?,
            base,
            path: entry.path("path")?.unwrap_or_else(|| "/".into()),
            models: entry.names("models")?.unwrap_or_default(),
            pool: entry.name("pool")?,
            on_prem: entry.flag("on_prem")?.unwrap_or(false),
            headers,
            connect_timeout: entry.time("connect_timeout", 5_000)?,
            first_byte_timeout: entry.time("first_byte_timeout", 120_000)?,
            timeout: entry.time("timeout", 600_000)?,
            health: entry.path("health")?.map(|path| Health { path, every }),
            tls_ca,
        })
    }

    fn to_toml(&self) -> Table {
        let mut table = Table::new();
        table.insert("name".into(), self.name.clone().into());
        table.insert("url".into(), self.base.to_string().into());
        table.insert("path".into(), self.path.clone().into());
        table.insert("models".into(), texts(&self.models));
        table.insert("pool".into(), self.pool.clone().into());
        table.insert("on_prem".into(), self.on_prem.into());
        if !self.headers.is_empty() {
            let headers = self.headers.iter().map(|h| (h.name.as_str().to_owned(), h.to_toml()));
            table.insert("headers".into(), Value::Table(headers.collect()));
        }
        let mut time = |key: &str, time: Duration| table.insert(key.into(), format!("{}ms", millis(time)).into());
        time("connect_timeout", self.connect_timeout);
        time("first_byte_timeout", self.first_byte_timeout);
        time("timeout", self.timeout);
        if let Some(health) = &self.health {
            time("health_every", health.every);
            table.insert("health".into(), health.path.clone().into());
        }
        if let Some(file) = &self.tls_ca {
            table.insert("tls_ca".into(), file.to_string_lossy().into_owned().into());
        }
        table
    }
}

impl Route {
    const KEYS: &[&str] = &["queue", "tenants", "upstreams"];

    fn of(entry: &Entry<'_>) -> Result<Route, String> {
        entry.known(Route::KEYS)?;
        let upstreams = entry.names("upstreams")?.filter(|list| (1..=limits::DISPATCH_UPSTREAMS).contains(&list.len()));
        let tenants = entry.names("tenants")?.unwrap_or_else(|| vec![TENANT.into()]);
        if tenants != [TENANT] {
            return Err(entry.bad("tenants", "there is one tenant without tokens, `default`"));
        }
        Ok(Route {
            queue: entry.name("queue")?,
            tenants,
            upstreams: upstreams.ok_or_else(|| entry.bad("upstreams", "must name 1 to 32 upstreams"))?,
        })
    }

    fn to_toml(&self) -> Table {
        let mut table = Table::new();
        table.insert("queue".into(), self.queue.clone().into());
        table.insert("tenants".into(), texts(&self.tenants));
        table.insert("upstreams".into(), texts(&self.upstreams));
        table
    }
}

fn number(n: u64) -> Value {
    i64::try_from(n).unwrap_or(i64::MAX).into()
}

fn texts(list: &[String]) -> Value {
    Value::Array(list.iter().map(|t| t.clone().into()).collect())
}

fn once<'a>(list: &str, names: impl Iterator<Item = &'a String>) -> Result<(), String> {
    let mut seen = BTreeSet::new();
    match names.into_iter().find(|name| !seen.insert(*name)) {
        Some(name) => Err(format!("`{list}`: `{name}` is there twice")),
        None => Ok(()),
    }
}

/// One table of a list, and what it is called in complaints.
struct Entry<'a> {
    at: String,
    table: &'a Table,
}

fn entries<'a>(key: &str, value: &'a Value) -> Result<Vec<Entry<'a>>, String> {
    let bad = || format!("`{key}` must be tables that begin with [[{key}]]");
    let list = value.as_array().ok_or_else(bad)?;
    let named = |(n, value): (usize, &'a Value)| {
        let table = value.as_table().ok_or_else(bad)?;
        let name = ["name", "queue"].iter().find_map(|k| table.get(*k)?.as_str());
        let at = name.map_or_else(|| format!("{key}[{n}]"), |name| format!("{key}.{}", name.escape_debug()));
        Ok(Entry { at, table })
    };
    list.iter().enumerate().map(named).collect()
}

impl Entry<'_> {
    fn bad(&self, key: &str, what: &str) -> String {
        format!("`{}.{key}`: {what}", self.at)
    }

    fn known(&self, keys: &[&str]) -> Result<(), String> {
        match self.table.keys().find(|key| !keys.contains(&key.as_str())) {
            Some(key) => {
                Err(format!("`{}`: there is no key `{}`; there are: {}", self.at, key.escape_debug(), keys.join(", ")))
            }
            None => Ok(()),
        }
    }

    fn get<T>(&self, key: &str, what: &str, read: impl Fn(&Value) -> Option<T>) -> Result<Option<T>, String> {
        self.table.get(key).map(|value| read(value).ok_or_else(|| self.bad(key, what))).transpose()
    }

    fn text(&self, key: &str) -> Result<Option<String>, String> {
        self.get(key, "must be a string", |v| v.as_str().map(str::to_owned))
    }

    fn flag(&self, key: &str) -> Result<Option<bool>, String> {
        self.get(key, "must be true or false", Value::as_bool)
    }

    fn number(&self, key: &str, least: u64, most: u64) -> Result<Option<u64>, String> {
        self.get(key, &format!("must be a whole number from {least} to {most}"), |v| {
            v.as_integer().and_then(|n| u64::try_from(n).ok()).filter(|n| (least..=most).contains(n))
        })
    }

    fn time(&self, key: &str, default_ms: u64) -> Result<Duration, String> {
        let Some(text) = self.text(key)? else { return Ok(Duration::from_millis(default_ms)) };
        let read = time(key, &text).map_err(|why| format!("`{}`: {why}", self.at))?;
        let fits = (Duration::from_millis(1)..=Duration::from_secs(24 * 3_600)).contains(&read);
        if fits { Ok(read) } else { Err(self.bad(key, "must be from 1ms to 24h")) }
    }

    fn name(&self, key: &str) -> Result<String, String> {
        let name = self.text(key)?.ok_or_else(|| self.bad(key, "is missing"))?;
        if is_name(&name) { Ok(name) } else { Err(self.bad(key, NAME)) }
    }

    fn names(&self, key: &str) -> Result<Option<Vec<String>>, String> {
        let read = |v: &Value| {
            let names: Option<Vec<String>> = v.as_array()?.iter().map(|v| v.as_str().map(str::to_owned)).collect();
            names.filter(|names| names.iter().all(|name| is_name(name)))
        };
        self.get(key, "must be a list of names", read)
    }

    fn path(&self, key: &str) -> Result<Option<String>, String> {
        let read = |v: &Value| v.as_str().filter(|p| is_path(p)).map(str::to_owned);
        self.get(key, "must be a path that begins with /", read)
    }
}

const NAME: &str = "must be 1 to 128 bytes without control characters";

fn is_name(name: &str) -> bool {
    (1..=limits::NAME_BYTES).contains(&name.len()) && !name.chars().any(char::is_control)
}

fn is_path(path: &str) -> bool {
    path.starts_with('/') && path.parse::<hyper::http::uri::PathAndQuery>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENV: &[(&str, &str)] = &[("OCR_TOKEN", "s3cret")];

    fn read(text: &str) -> Result<Gateway, String> {
        let env: Vec<(String, String)> = ENV.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect();
        let table: Table = text.parse().unwrap();
        let mut gateway = Gateway::default();
        for (key, value) in &table {
            gateway.set(key, value, &env)?;
        }
        gateway.check()?;
        Ok(gateway)
    }

    const WHOLE: &str = r#"
        on_prem_tenants = ["default"]
        [[pools]]
        name = "gpu"
        total = 8
        batch_max = 6
        lease_ms = 30000
        fail_open = false
        [[upstreams]]
        name = "ocr-1"
        url = "https://10.0.0.7:9443/v2/"
        path = "/run"
        models = ["ocr"]
        pool = "gpu"
        on_prem = true
        connect_timeout = "1s"
        first_byte_timeout = "2m"
        timeout = "1h"
        health = "/healthz"
        headers.authorization = { env = "OCR_TOKEN", prefix = "Bearer " }
        tls_ca = "/etc/ssl/ocr.pem"
        [[routes]]
        queue = "ocr"
        upstreams = ["ocr-1"]
    "#;

    #[test]
    fn what_is_printed_can_be_read_and_tells_no_secret() {
        let gateway = read(WHOLE).unwrap();
        let upstream = &gateway.upstreams[0];
        assert_eq!((upstream.base.host.as_str(), upstream.base.port, upstream.base.tls), ("10.0.0.7", 9443, true));
        assert_eq!(upstream.base.prefix, "/v2");
        assert_eq!(upstream.headers[0].value, "Bearer s3cret");
        let mut table = Table::new();
        gateway.to_toml(&mut table);
        let printed = table.to_string();
        assert_eq!(read(&printed), Ok(gateway.clone()));
        let literal = read(&WHOLE.replace(r#"{ env = "OCR_TOKEN", prefix = "Bearer " }"#, r#""s3cret""#)).unwrap();
        let mut shown = Table::new();
        literal.to_toml(&mut shown);
        for told in [printed, shown.to_string(), format!("{gateway:?}"), format!("{literal:?}")] {
            assert!(!told.contains("s3cret"), "{told}");
        }
    }

    #[test]
    fn complaints_name_the_entry_and_its_key() {
        let with = |from: &str, to: &str| WHOLE.replace(from, to);
        for (file, word) in [
            ("pools = 1".into(), "[[pools]]"),
            ("on_prem_tenants = [\"a\"]".into(), "on_prem_tenants"),
            ("on_prem_tenants = \"default\"".into(), "on_prem_tenants"),
            ("[[pools]]\ntotal = 8".into(), "pools[0].name"),
            (with("total = 8", ""), "pools.gpu.total"),
            (with("total = 8", "total = -1"), "pools.gpu.total"),
            (with("total = 8", "total = 0"), "pools.gpu.total"),
            (with("total = 8", "total = 5"), "pools.gpu.batch_max"),
            (with("batch_max = 6", "batch = 6"), "`batch`"),
            (with("fail_open = false", "fail_open_local = 3"), "pools.gpu.fail_open_local"),
            (with("fail_open = false", "fail_open = true\nfail_open_local = 0"), "pools.gpu.fail_open_local"),
            (with("lease_ms = 30000", "lease_ms = 1"), "pools.gpu.lease_ms"),
            (with("https://10.0.0.7:9443/v2/", "ftp://x"), "upstreams.ocr-1.url"),
            (with("https://10.0.0.7:9443/v2/", "http://u:p@x"), "upstreams.ocr-1.url"),
            (with("https://10.0.0.7:9443/v2/", "http://x?q"), "upstreams.ocr-1.url"),
            (with("https://10.0.0.7:9443/v2/", "http://x"), "upstreams.ocr-1.tls_ca"),
            (with("\"/healthz\"", "\"healthz\""), "upstreams.ocr-1.health"),
            (with("[\"ocr\"]", "\"ocr\""), "upstreams.ocr-1.models"),
            (with("pool = \"gpu\"", "pool = \"cpu\""), "upstreams.ocr-1.pool"),
            (with("\"1s\"", "\"1\""), "connect_timeout"),
            (with("\"1s\"", "\"2d\""), "upstreams.ocr-1.connect_timeout"),
            (with("OCR_TOKEN", "NONE"), "upstreams.ocr-1.headers.authorization"),
            (with(r#"{ env = "OCR_TOKEN", prefix = "Bearer " }"#, r#""(not shown)""#), "headers.authorization"),
            (with("env = \"OCR_TOKEN\", ", ""), "upstreams.ocr-1.headers.authorization"),
            (with("headers.authorization", "headers.host"), "upstreams.ocr-1.headers.host"),
            (with("{ env = \"OCR_TOKEN\", prefix = \"Bearer \" }", "\"a\\nb\""), "headers.authorization"),
            (with("{ env = \"OCR_TOKEN\", prefix = \"Bearer \" }", "{ file = \"/none\" }"), "/none"),
            (with("\"/run\"", "\"run\""), "upstreams.ocr-1.path"),
            (with("upstreams = [\"ocr-1\"]", "upstreams = []"), "routes.ocr.upstreams"),
            (with("upstreams = [\"ocr-1\"]", "upstreams = [\"x\"]"), "routes.ocr.upstreams"),
            (with("upstreams = [\"ocr-1\"]", "upstreams = [\"ocr-1\"]\ntenants = [\"a\"]"), "routes.ocr.tenants"),
            (format!("{WHOLE}[[routes]]\nqueue = \"ocr\"\nupstreams = [\"ocr-1\"]"), "twice"),
            (format!("{WHOLE}[[pools]]\nname = \"gpu\"\ntotal = 1"), "twice"),
        ] {
            let why = read(&file).unwrap_err();
            assert!(why.contains(word), "{why} should name {word}");
        }
    }
}
