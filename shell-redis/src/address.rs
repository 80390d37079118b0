//! Where a Redis is: `redis://[user][:password@]host[:port][,host[:port]…][/database]`.

use std::fmt;
use std::str::FromStr;

use redis::{ConnectionInfo, IntoConnectionInfo};

/// One or several servers of which one is the primary, with what is needed to be let in.
#[derive(Clone, PartialEq, Eq)]
pub struct Address {
    /// Everything between `redis://` and the hosts, with the `@`.
    credentials: String,
    hosts: Vec<String>,
    /// From the slash on, or empty.
    rest: String,
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = |why: &str| format!("this is not the address of a Redis: {why}; as redis://:PASSWORD@HOST:6379/0");
        let body = text.strip_prefix("redis://").ok_or_else(|| bad("it does not begin with redis://"))?;
        if body.contains(['?', '#']) {
            return Err(bad("it has a query"));
        }
        let (credentials, body) = match body.rfind('@') {
            Some(at) => body.split_at(at + 1),
            None => ("", body),
        };
        let (hosts, rest) = body.split_at(body.find('/').unwrap_or(body.len()));
        let hosts: Vec<String> = hosts.split(',').map(str::to_owned).collect();
        if hosts.iter().any(String::is_empty) {
            return Err(bad("a host is missing"));
        }
        let address = Address { credentials: credentials.into(), hosts, rest: rest.into() };
        // The password must not get into a message.
        address.servers().map_err(|why| bad(&why))?;
        Ok(address)
    }
}

impl Address {
    /// What to connect to, one for each host.
    pub(crate) fn servers(&self) -> Result<Vec<ConnectionInfo>, String> {
        let one = |host: &String| {
            let info = format!("redis://{}{host}{}", self.credentials, self.rest).into_connection_info();
            info.map_err(|e| e.to_string())
        };
        self.hosts.iter().map(one).collect()
    }

    /// As it was given, password included.
    pub fn to_url(&self) -> String {
        format!("redis://{}{}{}", self.credentials, self.hosts.join(","), self.rest)
    }
}

/// Without the password.
impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let user = self.credentials.split([':', '@']).next().unwrap_or_default();
        let hidden = if self.credentials.contains(':') { ":***" } else { "" };
        let at = if self.credentials.is_empty() { "" } else { "@" };
        write!(f, "redis://{user}{hidden}{at}{}{}", self.hosts.join(","), self.rest)
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_read_back_and_hide_their_password() {
        for (text, shown) in [
            ("redis://127.0.0.1", "redis://127.0.0.1"),
            ("redis://localhost:6380/3", "redis://localhost:6380/3"),
            ("redis://:p%40ss@a:1,b:2/0", "redis://:***@a:1,b:2/0"),
            ("redis://me:secret@a", "redis://me:***@a"),
            ("redis://[::1]:6379", "redis://[::1]:6379"),
        ] {
            let address: Address = text.parse().unwrap();
            assert_eq!(address.to_string(), shown);
            assert_eq!(address.to_url(), text);
        }
        assert_eq!("redis://:x@a:1,b:2/7".parse::<Address>().unwrap().servers().unwrap().len(), 2);
        for text in ["", "redis://", "redis:", "redis://a,", "redis://a/x", "redis://a:b", "http://a", "redis://a?b=c"]
        {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
        let why = "redis://:secret@a/x".parse::<Address>().unwrap_err();
        assert!(!why.contains("secret"), "{why}");
    }
}
