//! Connections to one upstream: opened, kept for the next call, and closed at once when a call is given up.
//!
//! On HTTP/1.1 hanging up is the one way to tell an upstream to stop. So a connection belongs to the call that
//! uses it: with the call it goes, unless the call has come to its proper end. What the call held is held until
//! the upstream has hung up too, for a second at most: until then it may still be at work on it.

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto};

use super::settings::Base;
use super::slot::Token;
use crate::body::Body;

/// Kept without a call for so long: shorter than what the common servers of models keep them (5 s), so that a
/// call is seldom sent into a connection that is just being closed.
const IDLE: Duration = Duration::from_secs(3);
/// A connection whose last call has ended is ready for the next one within this, or is not used again.
const READY: Duration = Duration::from_millis(20);
/// Kept without a call at once.
const IDLE_MAX: usize = 64;

/// How long an upstream may take to hang up on a call that was given up.
pub const FAREWELL: Duration = Duration::from_secs(1);

/// One connection. Dropped, it is closed, whatever is under way on it.
pub struct Connection {
    pub sender: SendRequest<Body>,
    task: JoinHandle<()>,
    /// A second handle of the socket, for saying farewell when the first one is gone.
    socket: Option<std::net::TcpStream>,
    /// What the call that is under way holds.
    held: Option<Token>,
}

impl Connection {
    /// A call that holds this is about to use it.
    pub fn hold(&mut self, held: Option<Token>) {
        self.held = held;
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.task.abort();
        if let (Some(held), Some(socket), Ok(runtime)) =
            (self.held.take(), self.socket.take(), tokio::runtime::Handle::try_current())
        {
            runtime.spawn(async move {
                let _ = timeout(FAREWELL, farewell(socket)).await;
                drop(held);
            });
        }
    }
}

/// Says that nothing more comes, and waits for the upstream to close.
async fn farewell(socket: std::net::TcpStream) -> io::Result<()> {
    socket.shutdown(std::net::Shutdown::Write)?;
    let mut socket = TcpStream::from_std(socket)?;
    let mut rest = [0; 4 * 1024];
    while socket.read(&mut rest).await? > 0 {}
    Ok(())
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Connection")
    }
}

/// How an upstream is connected to, and the connections that wait for a call.
pub struct Connector {
    base: Base,
    tls: Option<(TlsConnector, ServerName<'static>)>,
    idle: Mutex<Vec<(Instant, Connection)>>,
}

impl std::fmt::Debug for Connector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Connector({})", self.base)
    }
}

impl Connector {
    /// `ca`: a file of roots to trust instead of the system's.
    pub fn new(base: Base, ca: Option<&Path>) -> Result<Connector, String> {
        let tls = match base.tls {
            false => None,
            true => {
                let name = ServerName::try_from(base.host.clone()).map_err(|e| format!("{}: {e}", base.host))?;
                Some((TlsConnector::from(Arc::new(trusting(ca)?)), name))
            }
        };
        Ok(Connector { base, tls, idle: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(Instant, Connection)>> {
        // A plain list: a panic elsewhere leaves nothing half done in it.
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One that was kept, if there is one that the upstream has not closed.
    pub async fn kept(&self) -> Option<Connection> {
        loop {
            let (since, mut connection) = self.lock().pop()?;
            if since.elapsed() >= IDLE {
                continue;
            }
            // Its last call may have ended just now; its client may even still be sending, which is not waited for.
            let ready = timeout(READY, connection.sender.ready());
            if matches!(ready.await, Ok(Ok(()))) {
                return Some(connection);
            }
        }
    }

    /// For the next call.
    pub fn keep(&self, mut connection: Connection) {
        connection.hold(None);
        let mut idle = self.lock();
        idle.retain(|(since, c)| since.elapsed() < IDLE && !c.sender.is_closed());
        if idle.len() < IDLE_MAX {
            idle.push((Instant::now(), connection));
        }
    }

    pub async fn open(&self) -> io::Result<Connection> {
        let stream = TcpStream::connect((self.base.host.as_str(), self.base.port)).await?;
        stream.set_nodelay(true)?;
        let stream = stream.into_std()?;
        let socket = stream.try_clone()?;
        let stream = TcpStream::from_std(stream)?;
        match &self.tls {
            None => speak(stream, socket).await,
            Some((connector, name)) => speak(connector.connect(name.clone(), stream).await?, socket).await,
        }
    }
}

async fn speak<S>(stream: S, socket: std::net::TcpStream) -> io::Result<Connection>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
    let task = tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "a connection to an upstream broke off");
        }
    });
    Ok(Connection { sender, task, socket: Some(socket), held: None })
}

fn trusting(ca: Option<&Path>) -> Result<ClientConfig, String> {
    let mut roots = RootCertStore::empty();
    match ca {
        Some(path) => {
            let bad = |why: &dyn std::fmt::Display| format!("{}: {why}", path.display());
            for certificate in CertificateDer::pem_file_iter(path).map_err(|e| bad(&e))? {
                let certificate = certificate.map_err(|e| bad(&e))?;
                roots.add(certificate).map_err(|e| bad(&e))?;
            }
            if roots.is_empty() {
                return Err(bad(&"there is no certificate in it"));
            }
        }
        None => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            if roots.is_empty() {
                return Err("the system trusts no root certificate: name a file with `tls_ca`".into());
            }
        }
    }
    let provider = Arc::new(crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let mut config = builder.map_err(|e| e.to_string())?.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}
