//! Which headers are passed on, and which back.

use hyper::HeaderMap;
use hyper::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONNECTION, CONTENT_SECURITY_POLICY, COOKIE, EXPECT, HOST, HeaderName, HeaderValue,
    PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, SET_COOKIE, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
    X_CONTENT_TYPE_OPTIONS,
};

use crate::request_id::{RequestId, X_REQUEST_ID};
use crate::upstream::settings::Upstream;

/// Of one connection only (RFC 9110, 7.6.1).
const HOP_BY_HOP: &[HeaderName] =
    &[CONNECTION, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE];
/// Of this server, or for it: what the upstream needs to know who calls stands in the configuration.
const OURS: &[HeaderName] = &[HOST, EXPECT, AUTHORIZATION, COOKIE];

static KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
static PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
static CLASS: HeaderName = HeaderName::from_static("leasehold-class");

/// What an upstream gets of a client's headers.
pub fn on(given: &HeaderMap, id: &RequestId) -> HeaderMap {
    let mut headers = end_to_end(given);
    for name in OURS {
        headers.remove(name);
    }
    remove_prefixed(&mut headers, "leasehold-");
    headers.insert(&X_REQUEST_ID, id.clone().into());
    headers.insert(&CLASS, HeaderValue::from_static("interactive"));
    // Its answer is passed back as it is, whatever the client can read.
    if !headers.contains_key(ACCEPT_ENCODING) {
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    }
    headers
}

/// What the configuration adds for this upstream. `None`: its address cannot stand in a header.
pub fn configured(headers: &mut HeaderMap, upstream: &Upstream) -> Option<()> {
    headers.insert(HOST, HeaderValue::from_str(&upstream.base.authority).ok()?);
    for header in &upstream.headers {
        headers.insert(header.name.clone(), header.value.clone());
    }
    Some(())
}

/// What a client gets of an upstream's headers. An upstream is not this server: what it sends is shown by no
/// browser as a page of this site, sets no cookies for it, and opens nothing of it to other sites.
pub fn back(given: HeaderMap) -> HeaderMap {
    let mut headers = end_to_end(&given);
    headers.remove(SET_COOKIE);
    remove_prefixed(&mut headers, "access-control-");
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static("default-src 'none'; sandbox"));
    headers
}

fn end_to_end(given: &HeaderMap) -> HeaderMap {
    let mut headers = given.clone();
    let named = given.get_all(CONNECTION).iter().filter_map(|v| v.to_str().ok()).flat_map(|v| v.split(','));
    for name in named {
        if let Ok(name) = name.trim().parse::<HeaderName>() {
            headers.remove(name);
        }
    }
    for name in HOP_BY_HOP.iter().chain([&KEEP_ALIVE, &PROXY_CONNECTION]) {
        headers.remove(name);
    }
    headers
}

fn remove_prefixed(headers: &mut HeaderMap, prefix: &str) {
    let names: Vec<HeaderName> = headers.keys().filter(|name| name.as_str().starts_with(prefix)).cloned().collect();
    for name in names {
        headers.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request_id::RequestIds;

    fn map(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let header = |(k, v): &(&'static str, &'static str)| (HeaderName::from_static(k), HeaderValue::from_static(v));
        pairs.iter().map(header).collect()
    }

    #[test]
    fn what_is_of_a_connection_or_of_this_server_stays_here() {
        let given = map(&[
            ("host", "here"),
            ("connection", "x-own, close"),
            ("x-own", "1"),
            ("keep-alive", "1"),
            ("te", "trailers"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "h2c"),
            ("authorization", "Bearer ours"),
            ("cookie", "a=b"),
            ("leasehold-class", "batch"),
            ("leasehold-wait-ms", "1"),
            ("content-length", "3"),
            ("content-type", "text/plain"),
            ("traceparent", "00-1-2-01"),
            ("x-other", "2"),
        ]);
        let sent = on(&given, &RequestIds::new().of(&given));
        let mut names: Vec<&str> = sent.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(
            names,
            [
                "accept-encoding",
                "content-length",
                "content-type",
                "leasehold-class",
                "traceparent",
                "x-other",
                "x-request-id"
            ]
        );
        assert_eq!(sent.get(&CLASS).unwrap(), "interactive");
    }

    #[test]
    fn an_upstream_sets_nothing_for_this_site() {
        let given = map(&[
            ("set-cookie", "a=b"),
            ("access-control-allow-origin", "*"),
            ("content-security-policy", "default-src *"),
            ("transfer-encoding", "chunked"),
            ("content-type", "text/html"),
            ("x-model", "m"),
        ]);
        let got = back(given);
        let mut names: Vec<&str> = got.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["content-security-policy", "content-type", "x-content-type-options", "x-model"]);
        assert!(got.get("content-security-policy").unwrap().to_str().unwrap().contains("sandbox"));
    }
}
