//! A page for people: queues at a glance.

use hyper::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderValue, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
    X_FRAME_OPTIONS,
};
use leasehold_core::job::record::Status;
use leasehold_core::{Request, Response as Answer};

use super::call::App;
use crate::body::{Body, Response};
use crate::problem::Problem;
use crate::wire::submit::TENANT;
use crate::wire::view;

pub async fn page(app: &App) -> Result<Response, Problem> {
    let mut html = String::from(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><title>Leasehold</title></head><body>\
         <h1>Leasehold</h1>",
    );
    match app.driver.ask(Request::Queues { tenant: TENANT.into() }).await {
        Ok(Answer::Queues(queues)) => {
            html.push_str("<table border=\"1\" cellpadding=\"4\"><thead><tr><th>Queue</th>");
            for status in Status::ALL {
                html.push_str(&format!("<th>{}</th>", status.text()));
            }
            html.push_str("<th>Oldest due</th><th>Paused</th></tr></thead><tbody>");
            for queue in &queues {
                html.push_str("<tr><td>");
                escape(&mut html, &queue.name);
                html.push_str("</td>");
                for status in Status::ALL {
                    html.push_str(&format!("<td>{}</td>", view::depth(queue, |_, s| s == status)));
                }
                let age = queue.oldest_due.map(|due| queue.at.saturating_sub(due) / 1_000_000);
                html.push_str(&age.map_or("<td></td>".into(), |s| format!("<td>{s} s ago</td>")));
                html.push_str("<td>");
                if queue.paused {
                    html.push_str("paused: ");
                    escape(&mut html, queue.reason.as_deref().unwrap_or("no reason given"));
                }
                html.push_str("</td></tr>");
            }
            html.push_str("</tbody></table>");
            if queues.is_empty() {
                html.push_str("<p>No queues yet.</p>");
            }
        }
        Ok(_) => {}
        Err(failure) => {
            html.push_str("<p>The queues cannot be read: ");
            escape(&mut html, crate::problem::of_failure(&failure).title);
            html.push_str(".</p>");
        }
    }
    html.push_str(
        "<p><a href=\"/metrics\">metrics</a> · <a href=\"/openapi.json\">description of the API</a> · \
         <a href=\"/readyz\">readiness</a></p></body></html>",
    );
    let mut response = Response::new(Body::full(html));
    let headers = response.headers_mut();
    for (name, value) in [
        (CONTENT_TYPE, "text/html; charset=utf-8"),
        (CONTENT_SECURITY_POLICY, "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (X_FRAME_OPTIONS, "DENY"),
        (REFERRER_POLICY, "no-referrer"),
        (CACHE_CONTROL, "no-store"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    Ok(response)
}

/// Everything that came from a client is a name, never markup.
fn escape(out: &mut String, text: &str) {
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn nothing_breaks_out() {
        let mut out = String::new();
        super::escape(&mut out, "<script a=\"b\" c='d'>&");
        assert_eq!(out, "&lt;script a=&quot;b&quot; c=&#39;d&#39;&gt;&amp;");
    }
}
