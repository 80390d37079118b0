//! Goal: an upstream is called as its configuration says: over TLS only if its certificate is trusted, with
//! headers whose values nobody gets to see, and not while it is not well. Method: a real upstream, before it
//! a TLS end with a certificate of its own, and the server's own output looked through for the secret.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

mod support;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use support::upstream::{Upstream, echoed};
use support::{BINARY, Folder, Server, until};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{ServerConfig, crypto};

const PATIENCE: Duration = Duration::from_secs(30);
const SECRET: &str = "s3cret-of-the-upstream";

fn fixture(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "tests", "tls", name].iter().collect()
}

/// Speaks TLS and passes on what it says to an upstream. Lives as long as the test.
fn behind_tls(upstream: SocketAddr) -> SocketAddr {
    let certificates = CertificateDer::pem_file_iter(fixture("server.pem")).unwrap().map(Result::unwrap).collect();
    let key = PrivateKeyDer::from_pem_file(fixture("server.key")).unwrap();
    let builder = ServerConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()));
    let config = builder.with_safe_default_protocol_versions().unwrap().with_no_client_auth();
    let acceptor = TlsAcceptor::from(Arc::new(config.with_single_cert(certificates, key).unwrap()));
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            tell.send(listener.local_addr().unwrap()).unwrap();
            while let Ok((stream, _)) = listener.accept().await {
                let acceptor = acceptor.clone();
                tokio::spawn(async move {
                    // Whoever does not trust the certificate hangs up.
                    let Ok(mut stream) = acceptor.accept(stream).await else { return };
                    let mut plain = tokio::net::TcpStream::connect(upstream).await.unwrap();
                    let _ = tokio::io::copy_bidirectional(&mut stream, &mut plain).await;
                });
            }
        });
    });
    told.recv().unwrap()
}

fn config(url: &str, more: &str) -> String {
    format!(
        "[[pools]]\nname = \"gpu\"\ntotal = 4\n[[upstreams]]\nname = \"one\"\nurl = \"{url}\"\nmodels = [\"m\"]\npool = \
         \"gpu\"\n{more}"
    )
}

fn started(folder: &Folder, toml: &str) -> Server {
    let server = Server::configured(folder, toml);
    until("the pool is set", PATIENCE, || server.client().get("/v1/pools/gpu").status == 200);
    server
}

#[test]
fn over_tls_an_upstream_is_called_only_if_it_is_trusted() {
    let upstream = Upstream::start();
    let end = behind_tls(upstream.address);
    let ca = format!("tls_ca = \"{}\"\n", fixture("ca.pem").display());
    for (host, more, status) in [
        ("127.0.0.1", ca.as_str(), 200),
        ("localhost", ca.as_str(), 200),
        // Signed by nobody whom the system trusts; and a certificate for another name.
        ("127.0.0.1", "", 502),
        ("127.0.0.2", ca.as_str(), 502),
    ] {
        let folder = Folder::new();
        let server = started(&folder, &config(&format!("https://{host}:{}", end.port()), more));
        for _ in 0..2 {
            let answer = server.client().send("POST", "/v1/proxy/m/echo", &[], b"over tls");
            assert_eq!(answer.status, status, "{host} {more}: {}", answer.text());
            if status == 200 {
                assert_eq!(echoed(&answer.body)["body"], "over tls");
            } else {
                assert_eq!(answer.code(), "upstream_failed");
            }
        }
    }
    assert_eq!(upstream.total(), 4);
}

#[test]
fn a_secret_goes_to_the_upstream_and_nowhere_else() {
    let upstream = Upstream::start();
    let folder = Folder::new();
    let file = folder.path().join("token");
    std::fs::write(&file, format!("{SECRET}\n")).unwrap();
    let from_file = format!("headers.authorization = {{ file = \"{}\", prefix = \"Bearer \" }}\n", file.display());
    let server = started(&folder, &config(&upstream.url(), &from_file));
    let answer = server.client().send("GET", "/v1/proxy/m/echo", &[("authorization", "Bearer mine")], b"");
    assert_eq!(echoed(&answer.body)["headers"]["authorization"], format!("Bearer {SECRET}"));
    for path in ["/metrics", "/openapi.json", "/v1/pools/gpu", "/"] {
        assert!(!server.client().get(path).text().contains(SECRET), "{path}");
    }
    let toml = folder.path().join("printed.toml");
    for (headers, env) in [
        (from_file.as_str(), None),
        ("headers.authorization = { env = \"OCR_TOKEN\" }\n", Some(SECRET)),
        ("headers.authorization = \"s3cret-of-the-upstream\"\n", None),
        // A complaint about it does not show it either.
        ("headers.authorization = { env = \"OCR_TOKEN\" }\n", Some("s3cret-of-the-upstream\u{7}")),
    ] {
        std::fs::write(&toml, config(&upstream.url(), headers)).unwrap();
        let mut command = Command::new(BINARY);
        command.args(["config", "--log", "trace", "--config", toml.to_str().unwrap()]).env_clear();
        if let Some(value) = env {
            command.env("OCR_TOKEN", value);
        }
        let output = command.output().unwrap();
        let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert_eq!(output.status.success(), env.is_none_or(|v| v == SECRET), "{said}");
        assert!(said.contains("authorization") && !said.contains(SECRET), "{said}");
    }
}

#[test]
fn an_upstream_that_is_not_well_is_not_called_until_it_is() {
    let upstream = Upstream::start();
    let folder = Folder::new();
    let server = started(&folder, &config(&upstream.url(), "health = \"/healthz\"\nhealth_every = \"100ms\"\n"));
    let call = || server.client().send("GET", "/v1/proxy/m/echo", &[], b"");
    assert_eq!(call().status, 200);
    upstream.always(Some("/status/500"));
    until("it is left alone", PATIENCE, || call().status == 503);
    let refused = call();
    assert_eq!((refused.status, refused.code()), (503, "upstream_unavailable".into()));
    upstream.always(None);
    until("it is called again", PATIENCE, || call().status == 200);
    // What is asked now and then carries no class: it takes no slot.
    assert!(upstream.requests().iter().any(|r| r.path == "/healthz" && !r.headers.contains_key("leasehold-class")));
}
