// Runs llama-server with the hooks of patches/0006.

#include "connections.h"
#include "pyorch-server.h"
#include "pyorch.h"

#include "arg.h"
#include "ggml-backend.h"
#include "json-schema-to-grammar.h"
#include "json-schema.h"
#include "llama-grammar-work.h"
#include "server-http.h"
#include "ui.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <vector>

#include <unistd.h>

int  llama_server(int argc, char ** argv);
void llama_server_terminate();

namespace pyorch {
namespace {

struct Route {
    std::string      method;
    std::string      path;
    int              when; // pyorch_server_when
    pyorch_answer_fn answer;
    void *           user;
};

// Never destroyed, because threads of the server may end after pyorch_server_run().
Connections & connections() {
    static auto * all = new Connections;
    return *all;
}

std::vector<Route>              routes;
std::vector<ggml_backend_dev_t> devices;
std::atomic<bool>               ends_answers; // see pyorch_server_end_answers()
Mutex                           serving;
const server_http_context *     http GUARDED_BY(serving) = nullptr; // while the server runs

// Returns llama-server's handler of the path, empty if it has none. REQUIRES: all its routes were added.
server_http_context::handler_t own_handler(const std::string & path) {
    MutexLock  lock(serving);
    const auto found = http ? http->handlers.find(path) : decltype(http->handlers.end()){};
    return http && found != http->handlers.end() ? found->second : nullptr;
}

std::string lines_of(const std::map<std::string, std::string> & headers) {
    std::string lines;
    for (const auto & [name, value] : headers) {
        lines += name + ": " + value + "\n";
    }
    return lines;
}

// Passes the request and the answer to the route's function, which may replace the answer.
void show(const Route & route, const server_http_req & request, server_http_res & response) {
    const std::string     headers  = lines_of(request.headers);
    const pyorch_exchange exchange = {
        headers.c_str(),
        request.body.data(),
        request.body.size(),
        response.data.data(),
        response.data.size(),
        response.status,
        connections().is_local(),
        &response,
        &request,
    };
    route.answer(route.user, &exchange);
}

const Route * find_route(const std::string & path, bool for_failures) {
    const auto found = std::find_if(routes.begin(), routes.end(), [&](const Route & route) {
        return route.path == path && (route.when == PYORCH_SERVER_FAILED) == for_failures;
    });
    return found != routes.end() ? &*found : nullptr;
}

constexpr char FAILS[] =
    R"({"error":{"code":503,"message":"the server ends, and with it this answer, which is not whole",)"
    R"("type":"unavailable_error"}})";

// Returns whether streams at the path end with OpenAI's "[DONE]".
bool says_done(const std::string & path) {
    return path == "/v1/completions" || path.find("/chat/completions") < path.size();
}

// A request that also ends when its connection or all answers end. Must live as long as its answer.
struct Request {
    const std::function<bool()> should_stop;
    server_http_req             request;

    explicit Request(const server_http_req & of) :
            should_stop([&closed = of.should_stop] { return ends_answers || closed(); }),
            request{ of.params, of.headers, of.path, of.query_string, of.body, of.files, should_stop } {}
};

// Returns llama-server's own answer, with the reason if it failed; in a stream the reason is the last chunk.
server_http_res_ptr own_answer(
    const server_http_context::handler_t & own, const std::string & path, const server_http_req & request) {
    const Route * explains = find_route(path, true);
    if (!explains) {
        return own(request);
    }
    auto stoppable = std::make_shared<Request>(request);
    auto response  = own(stoppable->request);
    stoppable->request.body.clear();
    stoppable->request.files.clear();
    if (response->is_stream()) { // a stream may outlive the routes
        response->next = [explains = *explains, stoppable, next = std::move(response->next)](std::string & part) {
            const std::string & path = explains.path;
            const bool          more = next(part);
            if (!more && part.empty() && ends_answers) {
                part = std::string(path == "/v1/messages" ? "event: error\ndata: " : "data: ") + FAILS + "\n\n";
            } else if (part.find("\"error\"") != std::string::npos) {
                const std::function<bool()> never = [] { return false; };
                server_http_res             failed;
                failed.status = 500;
                failed.data   = part;
                show(explains, { {}, {}, path, "", "", {}, never }, failed);
                part = failed.data;
            }
            if (!more && says_done(path) && part.rfind("data: {\"error\"", 0) == 0) {
                part += "data: [DONE]\n\n";
            }
            return more;
        };
    } else if (ends_answers && response->data.empty()) {
        response->status = 503;
        response->data   = FAILS;
    } else if (response->status >= 500) {
        show(*explains, request, *response);
    }
    return response;
}

server_http_res_ptr answer(const Route & route, const server_http_req & request) {
    connections().tell(-1, Connections::RECEIVED);
    const auto own      = own_handler(route.path);
    const bool first    = own && route.when == PYORCH_SERVER_FIRST;
    auto       response = own && !first ? own(request) : std::make_unique<server_http_res>();
    if (!own || first) {
        response->status = first ? 0 : 404;
    }
    show(route, request, *response);
    if (first && response->status == PYORCH_SERVER_CONTINUE) {
        const server_http_req instead{ request.params, request.headers, request.path, request.query_string,
            response->data, request.files, request.should_stop };
        return own_answer(own, route.path, instead);
    }
    return response->status ? std::move(response) : own_answer(own, route.path, request);
}

void add_routes(const server_http_context & context) {
    for (const Route & route : routes) {
        if (route.when == PYORCH_SERVER_FAILED && find_route(route.path, false)) {
            continue; // own_answer() answers these, too
        }
        const auto handler = [&route](const server_http_req & request) {
            return route.when == PYORCH_SERVER_FAILED ? own_answer(own_handler(route.path), route.path, request) :
                                                        answer(route, request);
        };
        route.method == "POST" ? context.post(route.path, handler) : context.get(route.path, handler);
        context.handlers.erase(route.path); // so that the server adds its own
    }
    MutexLock lock(serving);
    http = &context;
}

// The deepest nesting of brackets: JSON is read and written recursively.
constexpr int MAX_NESTING = 500;

void check_nesting(const std::string & json) {
    int  depth   = 0;
    bool in_text = false;
    for (size_t i = 0; i < json.size(); ++i) {
        const char c = json[i];
        if (in_text) {
            in_text = c != '"';
            i += c == '\\';
        } else if (c == '"') {
            in_text = true;
        } else if (c == '{' || c == '[') {
            if (++depth > MAX_NESTING) {
                throw std::invalid_argument(
                    "the JSON is nested more than " + std::to_string(MAX_NESTING) + " levels deep");
            }
        } else if (c == '}' || c == ']') {
            --depth;
        }
    }
}

// Whether the request of this thread has a schema that must be obeyed completely. A tool's schema is only a hint for
// the model; llama.cpp enforces the parts that it supports.
thread_local bool is_promised = false;

// Returns whether llama-server makes a grammar only from the request's tools: not if the answer has its own schema.
bool has_hints_only(const std::string & json) {
    if (json.find("tools") == std::string::npos) {
        return false;
    }
    const auto body  = common_json::parse_no_throw(json);
    const auto given = [&](const char * name) {
        return body.is_object() && body.contains(name) && !body.at(name).empty();
    };
    const bool is_text = given("response_format") && body.at("response_format").is_object() &&
        body.at("response_format").value("type", std::string()) == "text";
    return given("tools") && (is_text || !given("response_format")) && !given("json_schema");
}

// Returns the message of an error of the JSON library, without its number, and with a shortened citation.
std::string why(const common_json_error & error) {
    constexpr size_t  most = 300;
    const std::string what = error.what();
    const size_t      from = what.rfind("[json.exception", 0) == 0 ? what.find("] ") + 2 : 0;
    return what.substr(from, most) + (what.size() - from > most ? "..." : "");
}

// Returns llama-server's answer. Throws std::invalid_argument, which becomes status 400, if it cannot read the body.
server_http_res_ptr answer_of_server(const server_http_context::handler_t & own, const server_http_req & request) {
    connections().tell(-1, Connections::RECEIVED);
    llama_grammar_work(0); // start counting for its schemas
    check_nesting(request.body);
    try {
        is_promised = !has_hints_only(request.body);
        return own(request);
    } catch (const common_json_error & error) {
        try {
            common_json::parse(request.body);
        } catch (const common_json_error & of_body) {
            throw std::invalid_argument("the body is no JSON: " + why(of_body));
        }
        throw std::invalid_argument("a part of the request has the wrong type: " + why(error));
    } catch (const std::system_error &) {
        throw;
    } catch (const std::runtime_error & error) { // also an error of the request
        throw std::invalid_argument(error.what());
    }
}

void on_incomplete(std::string what) {
    if (is_promised) {
        static const std::string otherwise = ", accepting any string";
        for (size_t at; (at = what.find(otherwise)) != std::string::npos;) {
            what.erase(at, otherwise.size());
        }
        throw std::invalid_argument(what);
    }
}

// Returns whether the device of another process is lost: then it reports no memory.
bool is_lost() {
    return std::any_of(devices.begin(), devices.end(), [](ggml_backend_dev_t device) {
        size_t free = 0, total = 0;
        ggml_backend_dev_memory(device, &free, &total);
        return total == 0;
    });
}

} // namespace
} // namespace pyorch

using namespace pyorch;

extern "C" {

void pyorch_server_answer(const pyorch_exchange * exchange, int32_t status, const char * type, const char * location,
    const char * data, uint64_t data_size) {
    auto & response       = *(server_http_res *) exchange->answer;
    response.status       = status;
    response.content_type = type;
    response.data.assign(data, data_size);
    response.headers["Cache-Control"] = "no-store";
    if (location) {
        response.headers["Location"] = location;
    }
}

int32_t pyorch_server_has_left(const pyorch_exchange * exchange) {
    return ends_answers || ((const server_http_req *) exchange->request)->should_stop();
}

void pyorch_server_add_route(
    const char * method, const char * path, int32_t when, pyorch_answer_fn answer, void * user) {
    routes.push_back({ method, path, when, answer, user });
}

void pyorch_server_make_public(const char * path) { llama_server_hooks.public_paths.insert(path); }

int32_t pyorch_server_get_page(uint64_t i, pyorch_page_file * file) {
    const auto & files = llama_ui_get_assets();
    if (i >= files.size()) {
        return 0;
    }
    const auto & asset = files.data()[i];
    *file              = {
        asset.name.c_str(),
        asset.type.c_str(),
        asset.etag.c_str(),
        (const char *) asset.data,
        asset.size,
        llama_ui_use_gzip(),
    };
    return 1;
}

void pyorch_server_check_schemas(pyorch_answer_fn check, void * user) {
    common_chat_schema_check = [check, user](const common_json & schema) {
        const std::string     text = schema.dump();
        server_http_res       response;
        const pyorch_exchange exchange = { "", text.data(), text.size(), "", 0, 0, 0, &response, nullptr };
        response.status                = 0;
        check(user, &exchange);
        if (response.status != 0) {
            throw std::invalid_argument(response.data);
        }
    };
}

void pyorch_server_check_heads(pyorch_answer_fn check, void * user) {
    llama_server_hooks.refusal = [check, user](const std::map<std::string, std::string> & headers) {
        const std::string     lines = lines_of(headers);
        server_http_res       response;
        const pyorch_exchange exchange = { lines.c_str(), "", 0, "", 0, 0, connections().is_local(), &response,
            nullptr };
        check(user, &exchange);
        return response.data;
    };
}

void pyorch_server_set_limits(double head, double body) { connections().limit(head, body); }

void pyorch_server_set_devices(int32_t n, void * const * of_others) {
    devices.clear();
    for (int32_t i = 0; i < n; ++i) {
        devices.push_back((ggml_backend_dev_t) of_others[i]);
    }
}

void pyorch_server_check_arguments(int32_t argc, char ** argv, char * text, uint64_t text_size) {
    text[0]           = '\0';
    FILE * const said = tmpfile();
    const int    kept = said ? dup(STDERR_FILENO) : -1;
    if (kept >= 0) {
        common_params params;
        fflush(stderr);
        dup2(fileno(said), STDERR_FILENO);
        const bool taken = common_params_parse(argc, argv, params, LLAMA_EXAMPLE_SERVER);
        fflush(stderr);
        dup2(kept, STDERR_FILENO);
        close(kept);
        rewind(said);
        text[taken ? 0 : fread(text, 1, text_size - 1, said)] = '\0';
    }
    if (said) {
        fclose(said);
    }
}

int32_t pyorch_server_run(int32_t argc, char ** argv) {
    llama_server_hooks.routes     = add_routes;
    llama_server_hooks.connection = [](int socket, int state) {
        connections().tell(socket, (Connections::State) state);
    };
    llama_server_hooks.lost         = is_lost;
    llama_server_hooks.answer       = answer_of_server;
    json_schema_incomplete          = on_incomplete;
    llama_server_hooks.refuse_fatal = [](bool on) { pyorch_refuse_fatal_errors(on); };
    connections().accept();
    ends_answers     = false;
    const int status = llama_server(argc, argv);
    MutexLock lock(serving);
    http                       = nullptr;
    llama_server_hooks.context = nullptr;
    llama_server_hooks.refusal = server_hooks().refusal;
    common_chat_schema_check   = [](const common_json &) {};
    routes.clear();
    devices.clear();
    return status;
}

void * pyorch_server_get_context(void) {
    MutexLock lock(serving);
    return http && llama_server_hooks.context ? llama_server_hooks.context() : nullptr;
}

void pyorch_server_get_connections(pyorch_connections * out) {
    const auto counts = connections().counts();
    out->arriving     = counts.arriving;
    out->answering    = counts.answering;
}

double pyorch_server_get_waited(uint64_t n) { return connections().waited(n); }

void pyorch_server_stop_accepting(void) {
    MutexLock lock(serving);
    if (http && http->is_ready) {
        http->stop();
        connections().cut(false);
    }
}

void pyorch_server_ask(const char * path, const char * parameters, const char * body, double seconds,
    pyorch_answer_fn answer, void * user) {
    if (const auto own = own_handler(path)) {
        const auto                  begin = std::chrono::steady_clock::now();
        const std::function<bool()> late  = [&] {
            return std::chrono::steady_clock::now() - begin > std::chrono::duration<double>(seconds);
        };
        server_http_req    request{ {}, {}, path, parameters, body, {}, late };
        std::istringstream pairs(parameters);
        for (std::string pair; std::getline(pairs, pair, '&');) {
            const size_t equals                    = std::min(pair.find('='), pair.size());
            request.params[pair.substr(0, equals)] = pair.substr(std::min(equals + 1, pair.size()));
        }
        const auto response = own(request);
        show({ "GET", path, PYORCH_SERVER_BEHIND, answer, user }, request, *response);
    }
}

void pyorch_server_end_answers(void) { ends_answers = true; }

void pyorch_server_cancel(void) {
    connections().cut(true);
    // The server's loop must have begun, otherwise it would miss the end. So first ask a route that uses the loop.
    if (own_handler("/metrics")) {
        pyorch_server_ask("/metrics", "", "", 60, [](void *, const pyorch_exchange *) {}, nullptr);
        llama_server_terminate();
    }
}

} // extern "C"
