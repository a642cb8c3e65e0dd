package mqtt

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"sync"
	"time"

	"github.com/gorilla/websocket"
)

// link is an open network connection before MQTT: TCP, and TLS or a websocket over it.
type link struct {
	net.Conn // what MQTT is spoken through
	tcp      *stallConn
	finish   func() // says orderly that nothing more will be written
}

// open dials and shakes hands. ctx ends every part of it.
func open(ctx context.Context, u *url.URL, o Options) (*link, error) {
	config := o.TLS.Clone()
	if config == nil {
		config = &tls.Config{}
	}
	if config.ServerName == "" {
		config.ServerName = u.Hostname()
	}
	if u.Scheme == "ws" || u.Scheme == "wss" {
		return openWebsocket(ctx, u, o, config)
	}
	tcp, err := dialTCP(ctx, u.Host, o)
	if err != nil {
		return nil, err
	}
	if u.Scheme == "tcp" {
		return &link{Conn: tcp, tcp: tcp, finish: func() { _ = tcp.CloseWrite() }}, nil
	}
	c := tls.Client(tcp, config)
	if err := c.HandshakeContext(ctx); err != nil {
		tcp.Close()
		return nil, fmt.Errorf("TLS handshake: %w", err)
	}
	return &link{Conn: c, tcp: tcp, finish: func() { _, _ = c.CloseWrite(), tcp.CloseWrite() }}, nil
}

func dialTCP(ctx context.Context, addr string, o Options) (*stallConn, error) {
	c, err := (&net.Dialer{KeepAlive: -1}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	return &stallConn{TCPConn: c.(*net.TCPConn), limit: o.WriteTimeout}, nil
}

func openWebsocket(ctx context.Context, u *url.URL, o Options, config *tls.Config) (*link, error) {
	var tcp *stallConn
	unhook := func() bool { return true }
	d := websocket.Dialer{
		TLSClientConfig: config, Proxy: http.ProxyFromEnvironment, Subprotocols: []string{"mqtt"},
		ReadBufferSize: readBuffer, WriteBufferSize: writeChunk + 64,
		NetDialContext: func(ctx context.Context, _, addr string) (_ net.Conn, err error) {
			if tcp, err = dialTCP(ctx, addr, o); err != nil {
				return nil, err
			}
			opened := tcp // the handshake looks at the context's deadline only, not at its end
			unhook = context.AfterFunc(ctx, func() { opened.Close() })
			return tcp, nil
		},
	}
	ws, response, err := d.DialContext(ctx, u.String(), nil)
	if alive := unhook(); err == nil && !alive {
		err = context.Cause(ctx)
	}
	if err != nil {
		if errors.Is(err, websocket.ErrBadHandshake) && response != nil {
			err = fmt.Errorf("%w: HTTP status %d", err, response.StatusCode)
		}
		return nil, err
	}
	return &link{Conn: &wsConn{Conn: ws}, tcp: tcp, finish: func() {
		goodbye := websocket.FormatCloseMessage(websocket.CloseNormalClosure, "")
		_ = ws.WriteControl(websocket.CloseMessage, goodbye, time.Now().Add(o.WriteTimeout))
	}}, nil
}

// stallConn gives every write a deadline that moves along with its progress: it fails when for limit not one byte was
// taken and not one was confirmed. So a slow link never fails, however large the write, and a stalled one does within
// limit. It sits below TLS and the websocket, whose state does not survive a write that timed out half way.
type stallConn struct {
	*net.TCPConn
	limit time.Duration
}

func (c *stallConn) Write(p []byte) (int, error) {
	moved, queue, done := time.Now(), -1, 0
	for {
		// In slices: a deadline ends a write without saying what the kernel has sent meanwhile.
		if err := c.TCPConn.SetWriteDeadline(time.Now().Add(c.limit / 4)); err != nil {
			return done, err
		}
		n, err := c.TCPConn.Write(p[done:])
		done += n
		if err == nil || !errors.Is(err, os.ErrDeadlineExceeded) {
			return done, err
		}
		q := sendQueue(c.TCPConn)
		if n > 0 || q >= 0 && queue >= 0 && q < queue {
			moved = time.Now()
		}
		queue = q
		if time.Since(moved) >= c.limit {
			return done, fmt.Errorf("%w: a write made no progress for %s", ErrTimeout, c.limit)
		}
	}
}

// Write owns the write deadline: TLS, the websocket and paho all set one of their own, or take it away.
func (c *stallConn) SetWriteDeadline(time.Time) error { return nil }
func (c *stallConn) SetDeadline(t time.Time) error    { return c.SetReadDeadline(t) }

// wsConn makes a byte stream of a websocket's binary messages.
type wsConn struct {
	*websocket.Conn
	mu sync.Mutex // one writer at a time is all a websocket allows
	r  io.Reader
}

func (c *wsConn) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.WriteMessage(websocket.BinaryMessage, p); err != nil {
		return 0, err
	}
	return len(p), nil
}

func (c *wsConn) Read(p []byte) (int, error) {
	for {
		if c.r == nil {
			kind, r, err := c.NextReader()
			if err != nil {
				return 0, err
			}
			if kind != websocket.BinaryMessage {
				return 0, fmt.Errorf("%w: a text frame on the websocket", ErrProtocol)
			}
			c.r = r
		}
		n, err := c.r.Read(p)
		if err == io.EOF {
			c.r, err = nil, nil
		}
		if n > 0 || err != nil {
			return n, err
		}
	}
}

func (c *wsConn) SetDeadline(t time.Time) error { return c.SetReadDeadline(t) }
