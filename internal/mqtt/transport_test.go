package mqtt_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gorilla/websocket"

	"postrider/internal/mqtt"
	"postrider/internal/mqtttest"
)

// before puts a TLS server before a broker. It ends with the test.
func before(t *testing.T, config *tls.Config, broker string) (addr string) {
	t.Helper()
	l, err := tls.Listen("tcp", "127.0.0.1:0", config)
	if err != nil {
		t.Fatal(err)
	}
	var tasks sync.WaitGroup
	t.Cleanup(tasks.Wait)
	t.Cleanup(func() { l.Close() })
	tasks.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			tasks.Go(func() { bridge(c, broker) })
		}
	})
	return l.Addr().String()
}

func bridge(c io.ReadWriteCloser, broker string) {
	defer c.Close()
	b, err := net.Dial("tcp", broker)
	if err != nil {
		return
	}
	var down sync.WaitGroup
	down.Go(func() { _, _ = io.Copy(c, b); c.Close() })
	_, _ = io.Copy(b, c)
	b.Close()
	down.Wait()
}

var quiet = log.New(io.Discard, "", 0)

// stream is the server's side of an MQTT websocket.
type stream struct {
	*websocket.Conn
	rest []byte
}

func (s *stream) Read(p []byte) (n int, err error) {
	for len(s.rest) == 0 {
		if _, s.rest, err = s.ReadMessage(); err != nil {
			return 0, io.EOF
		}
	}
	n = copy(p, s.rest)
	s.rest = s.rest[n:]
	return n, nil
}

func (s *stream) Write(p []byte) (int, error) {
	// in two messages: MQTT packets and websocket messages have nothing to do with each other
	if err := s.WriteMessage(websocket.BinaryMessage, p[:len(p)/2]); err != nil {
		return 0, err
	}
	return len(p), s.WriteMessage(websocket.BinaryMessage, p[len(p)/2:])
}

func TestEveryTransportCarriesBothDirections(t *testing.T) {
	b := startBroker(t)
	p := mqtttest.NewProxy(t, b.Addr())
	web := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/mqtt" {
			http.NotFound(w, r)
			return
		}
		ws, err := (&websocket.Upgrader{Subprotocols: []string{"mqtt"}}).Upgrade(w, r, nil)
		if err == nil && ws.Subprotocol() == "mqtt" {
			bridge(&stream{Conn: ws}, p.Addr())
		}
	})
	plain, secure := httptest.NewServer(web), httptest.NewTLSServer(web)
	secure.Config.ErrorLog = quiet
	t.Cleanup(plain.Close)
	t.Cleanup(secure.Close)
	trust := secure.Client().Transport.(*http.Transport).TLSClientConfig

	for scheme, url := range map[string]string{
		"tcp": p.URL(),
		"tls": "tls://" + before(t, secure.TLS, p.Addr()),
		"ws":  strings.Replace(plain.URL, "http", "ws", 1) + "/mqtt",
		"wss": strings.Replace(secure.URL, "https", "wss", 1) + "/mqtt",
	} {
		t.Run(scheme, func(t *testing.T) {
			o := mqtt.Options{Broker: url, TLS: trust, ClientID: scheme + "-c", Will: &mqtt.Will{Topic: "t/will", Payload: []byte("gone")}}
			s := subscribe(t, mqtt.Options{Broker: url, TLS: trust, ClientID: scheme + "-s"}, mqtt.Subscription{})
			c := dial(t, o)
			publishAll(t, c, "t/1", 0, 2000)
			for n := range 2000 {
				m := receive(t, s)
				if string(m.Payload) != fmt.Sprint(n) {
					t.Fatalf("got %q, want %d", m.Payload, n)
				}
				m.Ack()
			}
			if err := outcome(t, c.Publish("u/large", false, make([]byte, 1<<20))); err != nil {
				t.Fatal(err)
			}
			before := p.Counts()
			began := time.Now()
			c.Close()
			s.Close()
			if took := time.Since(began); took > 400*time.Millisecond {
				t.Errorf("the broker hangs up after a DISCONNECT, no time limit should have been needed: %s", took)
			}
			p.Await("both DISCONNECTs and all PUBACKs", func(n mqtttest.Counts) bool {
				return n.Disconnects == before.Disconnects+2 && n.ClientPubacks%2000 == 0
			})

			o.Broker = strings.Replace(url, "/mqtt", "/nothing", 1)
			if o.Broker != url {
				_, err := mqtt.Dial(context.Background(), o)
				wantErr(t, err, mqtt.ErrUnreachable)
			}
		})
	}
}

func TestACertificateThatIsNotTrustedIsRefused(t *testing.T) {
	secure := httptest.NewTLSServer(nil)
	secure.Config.ErrorLog = quiet
	t.Cleanup(secure.Close)
	for _, scheme := range []string{"tls", "wss"} {
		_, err := mqtt.Dial(context.Background(), mqtt.Options{Broker: scheme + "://" + secure.Listener.Addr().String(), ClientID: "c"})
		wantErr(t, err, mqtt.ErrUnreachable)
		var verification *tls.CertificateVerificationError
		if !errors.As(err, &verification) {
			t.Errorf("%s: %v", scheme, err)
		}
	}
}
