package mqtt

import (
	"cmp"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// Options of one connection. Broker and ClientID are required; the zero value of the rest works.
type Options struct {
	Broker   string // as ParseBroker takes it
	ClientID string // unique in the broker: a second connection with the same id cuts the first
	Username string // these two win over what the Broker address holds
	Password string
	TLS      *tls.Config // for tls and wss; nil: the system's roots

	ConnectTimeout time.Duration // dial, handshakes and CONNACK together, then as much for a SUBACK; default 3 s
	KeepAlive      time.Duration // a ping after this long without a word from either side; default 5 s; the broker is told whole seconds
	PingTimeout    time.Duration // an idle broker has this long to answer it; default 2 s
	WriteTimeout   time.Duration // a write may be this long without any progress; default 2 s, never 0

	Will *Will
}

// Will is what the broker publishes, at QoS 1, when the connection ends without a DISCONNECT.
type Will struct {
	Topic   string
	Payload []byte
	Retain  bool
}

func (o Options) withDefaults() Options {
	o.ConnectTimeout = cmp.Or(max(o.ConnectTimeout, 0), 3*time.Second)
	o.KeepAlive = cmp.Or(max(o.KeepAlive, 0), 5*time.Second)
	o.PingTimeout = cmp.Or(max(o.PingTimeout, 0), 2*time.Second)
	o.WriteTimeout = cmp.Or(max(o.WriteTimeout, 0), 2*time.Second)
	return o
}

// prepare checks what paho does not and returns the address without its credentials.
func (o *Options) prepare() (*url.URL, error) {
	u, err := ParseBroker(o.Broker)
	if err != nil {
		return nil, err
	}
	if u.User != nil {
		password, _ := u.User.Password()
		o.Username, o.Password = cmp.Or(o.Username, u.User.Username()), cmp.Or(o.Password, password)
		u.User = nil
	}
	if o.Password != "" && o.Username == "" {
		return nil, errors.New("a broker password needs a user name")
	}
	for what, s := range map[string]string{"client id": o.ClientID, "user name": o.Username, "password": o.Password} {
		if len(s) > maxString {
			return nil, fmt.Errorf("the %s is longer than %d bytes", what, maxString)
		}
	}
	if o.Will != nil && (o.Will.Topic == "" || len(o.Will.Topic) > maxString || len(o.Will.Payload) > maxString) {
		return nil, fmt.Errorf("the will needs a topic, and topic and payload of at most %d bytes", maxString)
	}
	return u, nil
}

// Schemes, what they are spoken over, and their usual ports.
var schemes = map[string]struct{ scheme, port string }{
	"tcp": {"tcp", "1883"}, "mqtt": {"tcp", "1883"},
	"tls": {"tls", "8883"}, "mqtts": {"tls", "8883"},
	"ws": {"ws", "80"}, "wss": {"wss", "443"},
}

// ParseBroker reads a broker address: host, host:port, or a URL with the scheme tcp, mqtt, tls, mqtts, ws or wss. The
// result always has a port and one of the schemes tcp, tls, ws, wss. Errors are one line and never hold a password.
func ParseBroker(s string) (*url.URL, error) {
	s = strings.TrimSpace(s)
	if s == "" {
		return nil, errors.New("broker address is empty")
	}
	shown := s // what an error may repeat
	if i := strings.LastIndexByte(s, '@'); i >= 0 {
		shown = "…" + s[i:]
	}
	shown, _, _ = strings.Cut(shown, "?") // a query may hold a token
	bad := func(format string, args ...any) error {
		return fmt.Errorf("broker address %q: %s", shown, fmt.Sprintf(format, args...))
	}
	for _, r := range s {
		if r <= ' ' || r == 0x7f {
			return nil, bad("contains a space or control character")
		}
	}
	scheme, rest, ok := strings.Cut(s, "://")
	if !ok {
		scheme, rest = "tcp", s
	}
	known, ok := schemes[strings.ToLower(scheme)]
	if !ok {
		return nil, bad("unknown scheme, use tcp, mqtt, tls, mqtts, ws or wss")
	}
	u, err := url.Parse(known.scheme + "://" + rest)
	if err != nil {
		// url.Error repeats the whole address, and its cause may hold a part of a password.
		return nil, bad("cannot be read as host:port or URL (a password's special characters are written %%XX, IPv6 as [::1]:1883)")
	}
	host, port := u.Hostname(), u.Port()
	switch {
	case host == "":
		return nil, bad("has no host")
	case strings.Contains(host, ":") && !strings.HasPrefix(u.Host, "["):
		return nil, bad("an IPv6 address is written in brackets, as [::1]:1883")
	case port == "":
		port = known.port
	default:
		if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
			return nil, bad("the port is not between 1 and 65535")
		}
	}
	if web := known.scheme == "ws" || known.scheme == "wss"; !web && (strings.Trim(u.Path, "/") != "" || u.RawQuery != "") || u.Fragment != "" {
		return nil, bad("something follows the port")
	}
	u.Host = net.JoinHostPort(host, port)
	if known.scheme == "tcp" || known.scheme == "tls" {
		u.Path = ""
	}
	return u, nil
}
